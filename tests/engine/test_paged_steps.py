"""What steps of many sequences are told, without a GPU."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from exl2chat.engine import device_draws
from exl2chat.engine.cache import PAGE
from exl2chat.engine.device_draws import DeviceDraws, Drawing
from exl2chat.engine.device_penalties import DeviceWindow, count_window
from exl2chat.engine.device_steps import RESULTS
from exl2chat.engine.embeddings import InputEmbeddings
from exl2chat.engine.executor import Executor
from exl2chat.engine.paged_steps import MOST, Mirrored, StepMemory, Stepped, alike_drafts, group
from exl2chat.engine.scheduler import Row, StepPlan
from exl2chat.settings import Sampling
from tests.engine.tiny_models import byte_model

CPU = torch.device("cpu")
VOCABULARY = 50
PLAIN, PENALIZED = Sampling(seed=1, top_k=7), Sampling(seed=2, repetition_penalty=1.5)


def row(job: int, start: int, *tokens: int, pages: tuple[int, ...] = (0,)) -> Row:
    return Row(job, 0, start, tokens, pages)


def test_a_step_is_sent_its_rows() -> None:
    inputs = StepMemory(3, CPU)
    assert list(inputs.tables) == [1, 3]
    positions = inputs.place([row(7, 260, 1, 2, pages=(4, 9)), row(8, 3, 5, pages=(2,))], 2)
    assert positions.tolist() == [[260, 261], [3, 4]]
    assert inputs.tokens[:4].tolist() == [1, 2, 5, 5]  # the last one fills up
    assert (inputs.firsts[:2].tolist(), inputs.positions[:4].tolist()) == ([260, 3], [260, 261, 3, 4])
    assert inputs.tables[3].device[:2].tolist() == [[4, 9, 0], [2, 0, 0]]
    assert (inputs.firsts.dtype, inputs.positions.dtype, inputs.tables[3].device.dtype) == (torch.int32,) * 3


def test_of_many_tokens_the_last_is_drawn_from() -> None:
    inputs = StepMemory(3, CPU)
    assert inputs.place([row(7, 250, *range(25), pages=(4, 9))], 32).tolist() == [[274]]
    assert inputs.tokens[:32].tolist() == [*range(25), *[24] * 7]
    assert (inputs.firsts[0], inputs.positions[0]) == (250, 274)


def test_page_tables_are_sent_where_they_changed() -> None:
    inputs = StepMemory(2, CPU)
    narrow, wide = inputs.tables[1].device, inputs.tables[2].device
    inputs.place([row(0, 9, 1, pages=(3,)), row(1, 9, 1, pages=(4,))], 1)
    assert narrow[:2].tolist() == [[3], [4]]
    narrow.fill_(-1)
    inputs.place([row(0, 10, 1, pages=(3,)), row(1, 10, 1, pages=(4,))], 1)
    assert bool((narrow == -1).all())
    inputs.place([row(0, 11, 1, pages=(3,)), row(2, 600, 1, pages=(5, 6))], 1)
    assert wide[:2].tolist() == [[3, 0], [5, 6]]
    assert bool((narrow == -1).all())
    inputs.place([row(job, 12, 1, pages=(3 + (job == 1),)) for job in range(4)], 1)  # rows 2 and 3 are new
    assert narrow[:5].tolist() == [[-1], [-1], [3], [3], [-1]]


def test_page_tables_that_were_not_sent_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = StepMemory(1, CPU)
    table = inputs.tables[1].device
    inputs.place([row(0, 9, 1, pages=(3,)), row(1, 9, 1, pages=(4,))], 1)
    for again in ((5, 4), (3, 6)):  # the row that failed as it is on the device or not
        with monkeypatch.context() as patch:
            patch.setattr(Mirrored, "send", interrupted)
            with pytest.raises(KeyboardInterrupt):
                inputs.tables[1].place([row(0, 10, 1, pages=(5,)), row(1, 10, 1, pages=(again[1],))])
        inputs.place([row(job, 10, 1, pages=(page,)) for job, page in enumerate(again)], 1)
        assert table[:2].ravel().tolist() == [*again]


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_the_logits_of_all_steps_are_kept_in_one_place() -> None:
    memory = StepMemory(2, CPU)
    many = memory.keep(torch.arange(6.0).view(3, 2))
    assert many.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert memory.keep(torch.tensor([[7.0, 8.0]])).data_ptr() == many.data_ptr()
    assert many.tolist() == [[7, 8], [2, 3], [4, 5]]


def draws() -> DeviceDraws:
    positions, tokens = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    return DeviceDraws(VOCABULARY, 64, positions, tokens, torch.zeros(3, RESULTS, dtype=torch.int32))


def test_each_row_draws_as_its_job_asks_and_is_written_once() -> None:
    subject = draws()
    assert bool((subject.table["greedy"] == 1).all())
    wanted = {5: Drawing(PLAIN, []), 6: Drawing(Sampling(seed=9, temperature=0.5, top_k=4), [])}
    assert subject.prepare([row(5, 3, 1), row(9, 3, 1), row(6, 3, 1)], 1, wanted)
    assert subject.table["seed"].tolist() == [1, 0, 9]
    assert subject.table["greedy"].tolist() == [0, 1, 0]
    assert subject.table["top_k"].tolist() == [7, 0, 4]
    assert len({*subject.table["position"].tolist(), *subject.table["token"].tolist()}) == 6
    assert subject.prepare([row(5, 4, 2), row(9, 4, 2), row(6, 4, 2)], 1, wanted)  # nobody said that it was sent
    subject.sent()
    assert not subject.prepare([row(5, 4, 2), row(9, 4, 2), row(6, 4, 2)], 1, wanted)
    assert subject.prepare([row(6, 5, 2), row(5, 5, 2)], 1, wanted)
    assert subject.table["seed"].tolist() == [9, 1, 0]


def test_every_token_of_a_row_is_drawn_after_but_where_penalties_count_and_where_nobody_asks() -> None:
    tables = []
    for settings, drawn in ((PLAIN, [1, 1, 0]), (PENALIZED, [0, 2, 0])):
        subject = draws()
        places = [subject.table[name].copy() for name in ("position", "token", "results")]
        subject.prepare([row(5, 3, 1, 2)], 3, {5: Drawing(settings, [1, 1, 1, 1, 2])})
        assert subject.table["seed"].tolist() == drawn
        assert [subject.table[name].tolist() for name in ("position", "token", "results")] == [
            addresses.tolist() for addresses in places
        ]
        tables.append(subject.table["seen"].tolist())
    assert [bool(seen) for seen in tables[0] + tables[1]] == [False] * 4 + [True, False]


def window_of(subject: DeviceDraws, place: int) -> int:
    return int(subject.table["seen"][place])


def test_penalties_count_on_from_step_to_step_and_anew_where_the_text_is_another() -> None:
    subject = draws()
    text = [3, 4, 3]
    wanted = {5: Drawing(PENALIZED, text)}
    subject.prepare([row(5, 2, 3)], 1, wanted)
    subject.sent()
    first = window_of(subject, 0)
    assert first
    expected = count_window(torch.tensor(text), PENALIZED.penalty_range, PENALIZED.penalty_decay, VOCABULARY, 65)
    assert torch.equal(subject._windows[wanted[5]].window.seen, expected.seen)
    kept = subject._windows[wanted[5]]  # so that its memory is not given out again
    text.append(8)
    assert not subject.prepare([row(5, 3, 8)], 1, wanted)
    assert subject.prepare([row(5, 3, 8)], 1, wanted)  # the token after 8 was taken back
    assert window_of(subject, 0) != first
    again = subject._windows[wanted[5]]
    text.append(9)
    subject.prepare([row(5, 4, 9)], 1, {})  # another draws
    assert window_of(subject, 0) == 0
    text.append(10)
    subject.prepare([row(5, 5, 10)], 1, wanted)
    assert subject._windows[wanted[5]] not in (kept, again)
    assert subject._windows[wanted[5]].window.history[:6].tolist() == [3, 4, 3, 8, 9, 10]


def test_a_place_that_no_row_has_draws_for_nobody() -> None:
    """What its last job counted in may be another's by now."""
    subject = draws()
    subject.prepare([row(4, 2, 3), row(5, 2, 3)], 1, {5: Drawing(PENALIZED, [1, 2, 3])})
    assert window_of(subject, 1)
    assert subject.prepare([row(4, 3, 3)], 1, {})
    assert window_of(subject, 1) == 0
    assert subject._windows == {}


def test_a_window_is_counted_once_however_many_groups_a_step_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five jobs in groups of three; the last one's token is not drawn here."""
    counted: list[int] = []

    def count(text: torch.Tensor, *more: int) -> DeviceWindow:
        counted.append(int(text[2]))
        return count_window(text, *more)

    monkeypatch.setattr(device_draws, "count_window", count)
    subject, texts = draws(), [[3, 4, job] for job in range(5)]
    wanted = {job: Drawing(PENALIZED, texts[job]) for job in range(4)}
    for _ in range(6):
        rows = [row(job, len(text) - 1, text[-1]) for job, text in enumerate(texts)]
        for some in (rows[:3], rows[3:]):
            subject.prepare(some, 1, wanted)
        for text in texts:
            text.append(7)
    assert counted == [0, 1, 2, 3]


def test_a_text_of_the_same_length_is_not_the_same_text() -> None:
    subject, old, new = draws(), Drawing(PENALIZED, [3, 4, 3]), Drawing(PENALIZED, [5, 6, 5, 6])
    subject.prepare([row(5, 2, 3)], 1, {5: old})
    subject.prepare([row(5, 3, 6)], 1, {5: new})
    assert subject._windows[new].window.history[:4].tolist() == [5, 6, 5, 6]


def test_what_a_failed_step_prepared_is_sent_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, wanted = draws(), {5: Drawing(PLAIN, [1]), 6: Drawing(PENALIZED, [1, 2, 3])}
    subject.prepare([], 1, {})
    subject.sent()
    with monkeypatch.context() as patch:
        patch.setattr(device_draws, "count_window", full)
        with pytest.raises(MemoryError):
            subject.prepare([row(5, 0, 1), row(6, 2, 3)], 1, wanted)
    assert subject.prepare([row(5, 0, 1)], 1, {5: wanted[5]})
    assert subject.table["seed"].tolist() == [1, 0, 0]


def test_a_step_that_failed_between_two_rows_has_changed_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a place would draw by another job's settings, or to no address."""
    subject, one, other = draws(), Drawing(PLAIN, [1]), Drawing(Sampling(seed=9), [1])
    rows, wanted = [row(5, 0, 1), row(6, 0, 1)], {5: one, 6: other}
    subject.prepare(rows, 1, wanted)
    expected = subject.table.copy()
    with monkeypatch.context() as patch:
        patch.setattr(device_draws, "sampling_row", interrupted)
        with pytest.raises(KeyboardInterrupt):  # place 0 gets a row that is known, place 1 one that is not
            subject.prepare(rows, 1, {5: other, 6: Drawing(PLAIN, [1])})
    subject.prepare(rows, 1, wanted)
    assert subject.table.tobytes() == expected.tobytes()


def full(*_: object) -> None:
    raise MemoryError


def lengths(rows: Sequence[Row], groups: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[len(rows[place].tokens) for place in places] for places in groups]


def of(*counts: int, start: int = 0) -> list[Row]:
    """Rows of a token and drafts."""
    return [Row(job, 0, start, tuple(range(count)), (0,), count - 1) for job, count in enumerate(counts)]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((1,) * 64, [[1] * 64]),
        ((1,) * 65, [[1] * 64, [1]]),
        ((3,), [[3]]),
        ((1, 8, 3), [[1, 8, 3]]),  # 8 each
        ((25, 1, 64, 1), [[1, 1], [25], [64]]),
        ((8,) * 9, [[8] * 8, [8]]),
        ((3,) * 17, [[3] * 16, [3]]),
        ((1,) * 30 + (2,), [[1] * 30 + [2]]),
        ((1,) * 31 + (8, 2), [[1] * 31, [8, 2]]),  # 33 times 8 are too many
    ],
)
def test_rows_are_a_step_together_as_far_as_they_fit(counts: tuple[int, ...], expected: list[list[int]]) -> None:
    rows = of(*counts)
    assert lengths(rows, group(rows, PAGE)) == expected


def test_the_end_of_a_prompt_is_a_step_of_its_own() -> None:
    rows = [replace(one, drafts=drafts) for one, drafts in zip(of(1, 3, 1, 3), (7, 0, 0, 2), strict=True)]
    assert group(rows, PAGE) == [[0, 2, 3], [1]]


def test_so_many_drafts_change_no_bit() -> None:
    """Up to 8 tokens are multiplied alike, what fills a step up among them."""
    assert [alike_drafts(count) for count in (1, 2, 3, 4, 5, 8, 64, 100)] == [7, 3, 1, 1, 0, 0, 0, 0]
    for count in range(1, 9):
        [places] = group(of(*[1 + alike_drafts(count)] * count), PAGE)
        assert len(places) == count


def test_a_row_without_room_is_not_filled_up() -> None:
    """Into pages that it does not have, nor to positions for which there are no angles."""
    roomy, tight = of(5, 1), of(3, 6, 1, start=PAGE - 6)
    for capacity, start in ((4 * PAGE, PAGE - 6), (PAGE - 1, PAGE - 7)):
        rows = [replace(one, start=start) for one in tight]
        assert lengths(rows, group(rows, capacity)) == [[6], [3, 1]]
    assert lengths(roomy, group([*roomy, replace(tight[2], start=PAGE - 1)], PAGE)[:1]) == [[5, 1]]
    assert group([*roomy, replace(tight[2], start=PAGE - 1)], PAGE) == [[0, 1], [2]]
    wider = [replace(one, pages=(0, 1)) for one in tight]
    assert lengths(wider, group(wider, 4 * PAGE)) == [[3, 6, 1]]


class FakeSteps:
    """Draws the row's own job after each token, after logits that are its tokens. They last until the next step."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self._memory = torch.empty(MOST, 1)

    def run(self, rows: Sequence[Row], _draws: Mapping[int, Drawing], meanwhile: Callable[[], None]) -> list[Stepped]:
        meanwhile()
        self.asked.append([row.job for row in rows])
        tokens = torch.tensor([[float(token)] for row in rows for token in row.tokens])
        self._memory.fill_(torch.nan)[: len(tokens)] = tokens
        counts = [len(row.tokens) for row in rows]
        logits = self._memory[: len(tokens)].split_with_sizes(counts)
        return [Stepped(each, (row.job,) * len(row.tokens)) for each, row in zip(logits, rows, strict=True)]


@pytest.mark.parametrize(("count", "parts"), [(3, [3]), (MOST, [MOST]), (MOST + 5, [MOST, 5])])
def test_more_rows_than_a_step_has_are_several_steps(count: int, parts: list[int]) -> None:
    model = byte_model()
    executor = Executor(model, model.new_cache(PAGE), VOCABULARY)
    steps = executor._steps = FakeSteps()  # type: ignore[assignment]
    plan = StepPlan((), (), (), (), tuple(row(job, 0, job + 100) for job in range(count)))
    computed = executor.run(plan, {job: Drawing(PLAIN, []) for job in range(1, count)})
    assert [len(jobs) for jobs in steps.asked] == parts
    assert computed.drawn == {job: (job,) for job in range(1, count)}
    assert [computed.logits(place).tolist() for place in (count - 1, 0)] == [[[count + 99]], [[100]]]


def test_rows_that_are_no_group_are_steps_of_their_own() -> None:
    model = byte_model()
    executor = Executor(model, model.new_cache(PAGE), VOCABULARY)
    steps = executor._steps = FakeSteps()  # type: ignore[assignment]
    longest = row(9, 0, *range(MOST + 1))
    rows = (row(5, 0, *range(9)), row(6, 0, 4), longest, replace(row(7, 0, 5, 6), drafts=1), row(8, 0, 7))
    computed = executor.run(StepPlan((), (), (), (), rows), {7: Drawing(PLAIN, []), 9: Drawing(PLAIN, [])})
    assert steps.asked == [[6, 7, 8], [5]]
    assert computed.drawn == {7: (7, 7)}
    assert [computed.logits(place).ravel().tolist() for place in (0, 1, 3, 4)] == [[*range(9)], [4], [5, 6], [7]]
    assert computed.logits(2).shape == (MOST + 1, model.config.vocab_size)


def test_rows_with_embeddings_in_them_are_no_graphs() -> None:
    """A graph begins with ids of tokens."""
    model, picture = byte_model(), InputEmbeddings.of(torch.ones(1, 64))
    executor = Executor(model, model.new_cache(PAGE), VOCABULARY)
    steps = executor._steps = FakeSteps()  # type: ignore[assignment]
    executor.embed((picture,))
    rows = (row(5, 0, 1), row(6, 0, 2, *picture.ids), row(7, 0, 3))
    computed = executor.run(StepPlan((), (), (), (), rows), {job: Drawing(PLAIN, []) for job in (6, 7)})
    assert steps.asked == [[5, 7]]
    assert computed.drawn == {7: (7,)}
    with_rows = replace(model, embedded=(picture,))
    expected = with_rows.forward(with_rows.inputs([2, *picture.ids]), model.new_cache(PAGE))
    torch.testing.assert_close(torch.from_numpy(computed.logits(1)), expected)
