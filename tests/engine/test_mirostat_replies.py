"""Where mirostat begins in a reply."""

from exl2chat.settings import Sampling
from tests.engine.dynamic_jobs import drain, generator, job, prompt, reply, streamed

NEW = 20


def test_a_limit_that_begins_low_leaves_the_likeliest_token_alone() -> None:
    """It takes many tokens to rise from there. Without it, others are drawn."""
    free = Sampling(temperature=1.0, top_p=1.0, seed=3, mirostat_tau=5.0)
    low = Sampling(temperature=1.0, top_p=1.0, seed=3, mirostat_tau=5.0, mirostat_mu=-100.0)
    greedy = streamed(prompt(10), NEW)
    assert streamed(prompt(10), NEW, low) == greedy != streamed(prompt(10), NEW, free)
    subject = generator()
    subject.enqueue(job(prompt(10), NEW, low))
    assert reply(drain(subject), 0) == greedy
