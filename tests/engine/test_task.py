"""What tokens mean as text and which may be drawn, with logits made by hand."""

import itertools
import sys
from collections.abc import Callable, Sequence
from types import FrameType

import numpy as np
import pytest

from exl2chat.engine.compile_grammar import compile_choice, compile_regex
from exl2chat.engine.filters import FilterConstraint
from exl2chat.engine.replies.choosing import guided
from exl2chat.engine.replies.jobs import Choice, Job
from exl2chat.engine.replies.language import Language
from exl2chat.engine.replies.task import Advance, Task
from exl2chat.engine.samplers.candidates import Candidates
from exl2chat.engine.stopping import StopConditions
from exl2chat.engine.token_table import TokenTable
from exl2chat.errors import ChatError, UsageError
from exl2chat.settings import Sampling
from tests.engine.fake_model import END, MARK, VOCABULARY
from tests.engine.tiny_models import Anything, ByteTokenizer

GREEDY = Sampling(temperature=0)
WORDS = {1: "he", 2: "hell", 3: " the", 4: "é"}


def language() -> Language:
    return Language(ByteTokenizer(WORDS), VOCABULARY)  # type: ignore[arg-type]


def task(limit: int = 100, prompt: Sequence[int] = (65, 66), sampling: Sampling = GREEDY, **more: object) -> Task:
    return Task(Job((tuple(prompt),), limit, sampling, **more), language())  # type: ignore[arg-type]


def ranked(*best: int) -> np.ndarray:
    """Logits by which these tokens are the likeliest, in order."""
    logits = np.zeros((1, VOCABULARY), np.float32)
    logits[0, list(best)] = np.arange(len(best), 0, -1)
    return logits


def drive(subject: Task, logits: Callable[[list[int]], np.ndarray]) -> list[Advance]:
    """Every step to the end; logits(reply so far)."""
    advances: list[Advance] = []
    while not advances or advances[-1].end is None:
        advances.append(step(subject, logits(subject.chooser.reply)))
        assert len(advances) < 200
    return advances


def step(subject: Task, rows: np.ndarray) -> Advance:
    return subject.push(subject.chooser.draw(rows))


def saying(data: bytes | str, otherwise: int = ord("x")) -> Callable[[list[int]], np.ndarray]:
    """The next byte of `data`, whatever was said in place of those before; then END. Second choice: `otherwise`."""
    ids = [*(data.encode() if isinstance(data, str) else data), END]
    return lambda reply: ranked(ids[min(len(reply), len(ids) - 1)], otherwise)


def text_of(advances: list[Advance]) -> str:
    return "".join(advance.text for advance in advances)


def ids_of(advances: list[Advance]) -> list[int]:
    return [token.id for advance in advances for token in advance.tokens]


ENDS = StopConditions.of([END])


def test_a_reply_is_the_text_of_its_tokens() -> None:
    subject = task(stops=ENDS)
    advances = drive(subject, saying(" aé€"))
    assert text_of(advances) == subject.text == " aé€"
    assert advances[-1].end is not None
    assert (advances[-1].end.reason, advances[-1].end.token) == ("stop_token", END)
    assert ids_of(advances) == list(" aé€".encode())


def test_a_broken_character_at_the_end_is_shown_as_such() -> None:
    assert text_of(drive(task(limit=2), saying(b"a\xe2\x82\xac"))) == "a�"


def test_special_tokens_are_text_only_on_request() -> None:
    for special, text in ((False, ""), (True, f"<{MARK}>")):
        assert text_of(drive(task(limit=1, special=special), lambda _: ranked(MARK))) == text


# Stop strings


def test_a_stop_string_is_withheld_with_its_tokens() -> None:
    subject = task(stops=StopConditions.of(["\nUser:", END]))
    advances = drive(subject, saying("hi\nUse me\nUser: x"))
    end = advances[-1].end
    assert end is not None
    assert text_of(advances) == "hi\nUse me"
    assert (end.reason, end.string, end.withheld_text) == ("stop_string", "\nUser:", "\nUser:")
    assert [token.id for token in end.withheld] == list(b"\nUser:")
    assert ids_of(advances) == list(b"hi\nUse me")


def test_an_earlier_string_that_has_only_begun_does_not_put_off_one_that_is_complete() -> None:
    """exllamav2 looks at the strings in their order, and returns at the first that has begun."""
    subject = task(stops=StopConditions.of(["abcd", "bc"]))
    assert text_of(drive(subject, saying("abcd"))) == "a"


def test_a_limit_releases_what_was_held() -> None:
    advances = drive(task(limit=3, stops=StopConditions.of(["###!"])), saying("####"))
    assert text_of(advances) == "###"
    assert ids_of(advances) == list(b"###")


# Banned strings


def test_a_banned_string_is_never_said_in_whatever_case() -> None:
    subject = task(stops=ENDS, banned=("bad",))
    advances = drive(subject, saying("a BAD bade"))
    assert text_of(advances) == subject.text == "a xAD xade"
    taken = ["".join(token.text for token in advance.suppressed) for advance in advances if advance.rewound]
    assert taken == ["BAD", "bad"]


def test_tokens_taken_back_are_in_no_result() -> None:
    """In exllamav2 the suppressed tokens are among those of the result (appendix B-7)."""
    advances = drive(task(stops=ENDS, banned=("bad",)), saying("a bad"))
    assert ids_of(advances) == list(b"a xad")
    assert [token.id for advance in advances for token in advance.suppressed] == list(b"bad")


def test_two_banned_strings_from_one_place_ban_both_first_tokens_there() -> None:
    def logits(reply: list[int]) -> np.ndarray:
        place = len(reply)
        return ranked(*(b"bcd"[:3] if place == 0 else b"uuu"))

    advances = drive(task(limit=3, banned=("bu", "cu")), logits)
    assert text_of(advances) == "duu"


def test_the_last_token_of_a_reply_can_be_taken_back() -> None:
    assert text_of(drive(task(limit=3, banned=("bad",)), saying("bad"))) == "xad"


def test_a_banned_string_that_begins_within_a_token_bans_the_token() -> None:
    def logits(reply: list[int]) -> np.ndarray:
        return ranked(3, ord("_")) if not reply else ranked(ord("n"))

    assert text_of(drive(task(limit=2, banned=("then",)), logits)) == "_n"


def test_the_sampler_forgets_what_was_taken_back() -> None:
    """Penalties and mirostat go on as if it had never been said."""
    sampling = Sampling(temperature=0, presence_penalty=5.0, mirostat_tau=2.0)

    def logits(reply: list[int]) -> np.ndarray:
        return ranked(b"bad"[len(reply) % 3], ord("q"))

    rewound, plain = task(limit=6, banned=("bad",), sampling=sampling), task(limit=6, sampling=sampling)
    advances = drive(rewound, logits)
    assert any(advance.rewound for advance in advances)
    assert rewound.chooser.reply[:4] == list(b"qadb")
    drive(plain, lambda reply: logits(reply) if reply else ranked(ord("q")))
    assert plain.chooser.reply == rewound.chooser.reply


def test_a_stop_string_in_front_of_a_banned_one_ends_the_reply() -> None:
    assert text_of(drive(task(stops=StopConditions.of(["b"]), banned=("abc",)), saying("abc"))) == "a"


def test_the_string_that_is_complete_first_counts_within_one_token_too() -> None:
    for stop, banned, text in (("e", "ll", "h"), ("l", "he", "_")):
        subject = task(limit=1, stops=StopConditions.of([stop]), banned=(banned,))
        assert text_of(drive(subject, lambda _: ranked(2, ord("_")))) == text  # 2 is "hell"


# Interrupts


class Interrupt:
    """Ctrl-C at a line of what `push` runs, counted from 0."""

    FILES = ("task.py", "choosing.py", "stopping.py", "detokenizer.py")

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: FrameType, event: str, _: object) -> "Interrupt | None":
        if not frame.f_code.co_filename.endswith(self.FILES):
            return None
        if event == "line":
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize(
    ("said", "more"),
    [
        ("aé <e>x", {"stops": StopConditions.of(["<end>", END])}),
        ("ab ###", {"stops": StopConditions.of(["##"])}),
        ("abad é", {"stops": ENDS, "banned": ("bad", "é")}),
        ("llo y", {"stops": ENDS, "heal": True, "prompt": (65, 1)}),
    ],
)
def test_a_push_that_is_interrupted_anywhere_is_made_again(said: str, more: dict[str, object]) -> None:
    expected = drive(task(**more), saying(said))  # type: ignore[arg-type]
    for line in itertools.count():
        subject, interrupt = task(**more), Interrupt(line)  # type: ignore[arg-type]
        advances: list[Advance] = []
        while not advances or advances[-1].end is None:
            token = subject.chooser.draw(saying(said)(subject.chooser.reply))
            sys.settrace(interrupt if interrupt.left >= 0 else None)
            try:
                advances.append(subject.push(token))
            except KeyboardInterrupt:
                continue
            finally:
                sys.settrace(None)
        assert text_of(advances) == subject.text == text_of(expected)
        assert ids_of(advances) == ids_of(expected)
        assert (advances[-1].end, subject.chooser.reply) == (expected[-1].end, expected_reply(expected))
        if interrupt.left >= 0:
            break
    assert line > 200


def expected_reply(advances: list[Advance]) -> list[int]:
    end = advances[-1].end
    assert end is not None
    return [*ids_of(advances), *(token.id for token in end.withheld), *([] if end.token is None else [end.token])]


# Healing


def test_a_healed_token_is_begun_again_and_its_text_is_the_prompts() -> None:
    """The prompt ends in "he"; the model would have said "hell" and, failing that, what does not fit."""
    subject = task(limit=2, prompt=(65, 1), heal=True)
    assert subject.prompts == ((65,),)
    advances = drive(subject, lambda reply: ranked(3, 2) if not reply else ranked(ord("o")))
    assert subject.chooser.reply == [2, ord("o")]
    assert text_of(advances) == "llo"


def test_a_healed_token_may_stay_as_it_was() -> None:
    subject = task(limit=2, prompt=(65, 1), heal=True)
    advances = drive(subject, lambda reply: ranked(3, 1, 2) if not reply else ranked(ord("y")))
    assert text_of(advances) == "y"


def test_a_lone_or_hidden_token_is_not_healed() -> None:
    assert task(prompt=(65,), heal=True).prompts == ((65,),)
    assert task(prompt=(65, MARK), heal=True).prompts == ((65, MARK),)


def test_a_pair_is_healed_if_it_has_one_end() -> None:
    """exllamav2 fails on the two (appendix B-7)."""
    pair = Task(Job(((65, 66, 1), (67, 1)), 5, GREEDY, guidance=2.0, heal=True), language())
    assert pair.prompts == ((65, 66), (67,))
    with pytest.raises(UsageError, match="healed"):
        Task(Job(((65, 66), (67, 1)), 5, GREEDY, guidance=2.0, heal=True), language())


# Constraints


def table() -> TokenTable:
    return TokenTable(ByteTokenizer(WORDS), VOCABULARY, {END})  # type: ignore[arg-type]


def test_a_constraint_holds_and_ends_the_reply() -> None:
    subject = task(stops=ENDS, constraint=compile_choice(table(), ["yes", "no"]))
    advances = drive(subject, saying("nxxxxx"))
    assert advances[-1].end is not None
    assert (text_of(advances), advances[-1].end.reason) == ("no", "end_filter")


def test_a_constraint_holds_for_a_healed_token() -> None:
    subject = task(stops=ENDS, prompt=(65, 1), heal=True, constraint=compile_choice(table(), ["llo", "y"]))
    assert text_of(drive(subject, saying("?" * 9))) == "llo"


def test_an_end_is_preferred_where_it_is_allowed() -> None:
    for prefer, text in ((False, "aaa"), (True, "a")):
        subject = task(stops=ENDS, constraint=compile_regex(table(), "a+"), prefer_end=prefer)
        assert text_of(drive(subject, saying("aaa"))) == text


def test_banned_strings_and_a_constraint_go_together() -> None:
    """exllamav2 refuses the two."""
    subject = task(stops=ENDS, constraint=compile_regex(table(), "[abx]{3}"), banned=("ab",))
    assert text_of(drive(subject, saying("zab"))) == "xxb"


def test_a_preferred_end_waits_for_the_healed_token() -> None:
    rule = FilterConstraint(table(), Anything())
    subject = task(stops=ENDS, prompt=(65, 1), heal=True, constraint=rule, prefer_end=True)
    assert text_of(drive(subject, lambda _: ranked(2))) == "ll"


def test_the_bytes_of_a_banned_character_are_taken_back_together() -> None:
    """Each is one token, and the sampler forgets them too, where a stop string holds them back as well."""
    sampling = Sampling(temperature=0, repetition_penalty=2.0)
    subject = task(limit=4, banned=("é",), stops=StopConditions.of(["xyz"]), sampling=sampling)
    first, second = "é".encode()
    for token in (ord("x"), first, second):
        advance = step(subject, ranked(token) * 10)
    assert [token.id for token in advance.suppressed] == [first, second]
    step(subject, ranked(ord("y")) * 10)
    rows = np.zeros((1, VOCABULARY), np.float32)
    rows[0, [first, ord("a")]] = 2.0, 1.5  # halved, the first would lose
    assert subject.chooser.draw(rows) == first


def test_the_first_bytes_of_a_character_that_may_be_banned_are_not_told() -> None:
    advances = drive(task(stops=ENDS, banned=("é",)), saying("é"))
    assert "é".encode()[0] not in ids_of(advances)


def test_where_everything_is_forbidden_the_job_fails() -> None:
    subject = task(stops=ENDS, constraint=compile_choice(table(), ["b"]), banned=("b",))
    with pytest.raises(ChatError, match="no token may come next"):
        drive(subject, saying("b"))


def test_min_new_tokens_gives_way_to_a_constraint_that_is_complete() -> None:
    subject = task(stops=ENDS, constraint=compile_regex(table(), "a"), min_new_tokens=5)
    assert text_of(drive(subject, saying("a"))) == "a"


def test_min_new_tokens_leaves_the_conditions_as_they_were() -> None:
    """exllamav2 adds the stop ids to the list of blocked tokens itself (appendix B-7)."""
    subject = task(stops=ENDS, min_new_tokens=2)
    drive(subject, lambda _: ranked(END, ord("y")))
    assert subject.chooser.reply == [ord("y"), ord("y"), END]
    assert subject.job.stops.ids == {END}


# Details


def test_details_are_those_of_what_could_be_drawn() -> None:
    subject = task(
        limit=1, sampling=Sampling(temperature=1.0, top_k=2, top_p=1.0, seed=1), probabilities=True, top_tokens=3,
        logits=True,
    )  # fmt: skip
    given = ranked(70, 71, 72)
    (token,) = drive(subject, lambda _: given)[0].tokens
    ratio = 1 / (1 + np.exp(-1.0))
    assert [top for top, _ in token.top] == [70, 71]
    assert [probability for _, probability in token.top] == pytest.approx([ratio, 1 - ratio])
    assert token.probability == pytest.approx(dict(token.top)[token.id])
    np.testing.assert_array_equal(token.logits, given[0])


def test_logits_are_left_as_they_are() -> None:
    given = ranked(70, 71)
    before = given.copy()
    subject = task(limit=1, min_new_tokens=1, stops=StopConditions.of([70]))
    drive(subject, lambda _: given)
    np.testing.assert_array_equal(given, before)


def test_a_hook_may_keep_a_token_from_the_constraint() -> None:
    def comment(choice: Choice) -> None:
        if not subject.chooser.reply:
            choice.token, choice.fed = ord("#"), False

    subject = task(stops=ENDS, constraint=compile_choice(table(), ["yes"]), hooks=(comment,))
    assert text_of(drive(subject, saying("?" * 9))) == "#yes"


def test_a_hook_that_chooses_no_token_is_told() -> None:
    def miss(choice: Choice) -> None:
        assert isinstance(choice.candidates, Candidates)
        choice.token = VOCABULARY

    with pytest.raises(UsageError, match="hook"):
        drive(task(hooks=(miss,)), saying("a"))


def test_guidance_mixes_log_probabilities() -> None:
    first, second = np.float32([[1, 2, 3], [3, 1, 0]])
    for scale in (0.0, 1.0, 2.5):
        wanted = scale * np.log(softmax(first)) + (1 - scale) * np.log(softmax(second))
        np.testing.assert_allclose(guided(first, second, scale), wanted, rtol=1e-5)


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum()
