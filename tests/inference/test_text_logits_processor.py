"""Items inside text: every mask against sets of spelt items, and stock ``generate`` around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from gr.inference import OutsideSpans, RowFilter, TextTrieLogitsProcessor, build_filter
from gr.tokenizer.trie import ItemTrie

Make = Callable[..., Any]
Items = list[tuple[int, ...]]

PAD, BOS, EOS, OPEN, CLOSE, VOCABULARY = 0, 1, 2, 8, 9, 48
CHAT: dict[str, Any] = {
    "do_sample": True,
    "top_k": 1,
    "top_p": 0.1,
    "temperature": 0.6,
    "repetition_penalty": 2.0,
    "no_repeat_ngram_size": 2,
    "sequence_bias": [[[OPEN], 2.0], [[10], -50.0], [[20], 30.0]],
    "suppress_tokens": [PAD],
}


def spelt(tokens: Tensor) -> Items:
    return [tuple(t for t in row if t >= 0) for row in tokens.tolist()]


def read(ids: list[int]) -> tuple[list[tuple[int, tuple[int, ...]]], tuple[int, ...] | None]:
    """Whole spans, with the position of their end, and the codes of an open one."""
    spans: list[tuple[int, tuple[int, ...]]] = []
    current: tuple[int, ...] | None = None
    for at, token in enumerate(ids):
        if token == OPEN:
            current = ()
        elif token == CLOSE:
            if current is not None:
                spans.append((at, current))
            current = None
        elif current is not None:
            current = (*current, token)
    return spans, current


def legal(
    ids: list[int], prompt: int, new: int, items: Items, kept: set[int], no_repeat: bool = False
) -> set[int]:
    """The tokens that may follow, from the definition."""
    spans, current = read(ids)
    left = {items[row] for row in kept}
    if no_repeat:
        left -= {codes for at, codes in spans if at >= prompt}
    if current is None:
        free = set(range(VOCABULARY)) - {code for item in items for code in item} - {CLOSE}
        room = prompt + new - len(ids) >= max(map(len, items)) + 2
        return free if left and room else free - {OPEN}
    depth = len(current)
    after = {i[depth] for i in left if i[:depth] == current and len(i) > depth}
    return after | ({CLOSE} if current in left else set())


def allowed(scores: Tensor) -> list[set[int]]:
    return [set(torch.nonzero(row > -torch.inf)[:, 0].tolist()) for row in scores]


CATALOGUES: dict[str, list[list[int]]] = {
    "mixed": [[10, -1, -1], [11, 20, -1], [11, 21, 30], [11, 21, 31], [12, 22, -1], [12, 22, -1]],
    "one": [[10, 20, 30]],
    "atomic": [[10], [11], [12], [15]],
}


@pytest.mark.parametrize("no_repeat", [False, True])
@pytest.mark.parametrize("name", ["shared", *CATALOGUES])
def test_masks_equal_sets_of_spelt_items(name: str, no_repeat: bool, item_tokens: Tensor) -> None:
    """Random walks after prompts with noise, whole items and open spans, padded on the left."""
    rng = np.random.default_rng(2)
    tokens = item_tokens if name == "shared" else torch.tensor(CATALOGUES[name])
    trie, items = ItemTrie(tokens), spelt(tokens)
    for trial in range(3):
        new = int(rng.integers(2, 45))
        # Three requests of two rows each.
        excluded = [rng.integers(0, len(items), size) for size in (0, 1, len(items))]
        keep = build_filter(trie, excluded) if trial else None
        everything = set(range(len(items)))
        kept = [everything - set(e.tolist()) if keep else everything for e in excluded]
        rows: list[list[int]] = []
        for at in range(6):
            prompt: list[int] = []
            for _ in range(int(rng.integers(0, 4))):
                noise = rng.integers(1, VOCABULARY, int(rng.integers(0, 6))).tolist()
                prompt += [*noise, OPEN, *items[int(rng.integers(len(items)))], CLOSE]
            candidates = [items[row] for row in sorted(kept[at // 2])]
            if candidates and rng.random() < 0.6 and new >= trie.levels + 1:
                item = candidates[int(rng.integers(len(candidates)))]
                prompt += [OPEN, *item[: int(rng.integers(0, len(item) + 1))]]
            rows.append(prompt)
        length = max(map(len, rows))
        rows = [[PAD] * (length - len(row)) + row for row in rows]
        processor = TextTrieLogitsProcessor(trie, length, new, OPEN, CLOSE, keep, no_repeat)
        for _ in range(new):
            scores = torch.randn(6, VOCABULARY)
            ids = torch.tensor(rows, dtype=torch.int64).view(6, -1)
            masked = processor(ids, scores)
            for at, row in enumerate(rows):
                right = legal(row, length, new, items, kept[at // 2], no_repeat)
                assert right
                assert allowed(masked)[at] == right, row
                chosen = torch.tensor(sorted(right))
                assert torch.equal(masked[at, chosen], scores[at, chosen])
                opens = OPEN in right and rng.random() < 0.4
                row.append(OPEN if opens else int(rng.choice(sorted(right))))
        assert all(read(row)[1] is None for row in rows)


def pad_left(rows: list[list[int]], padding: int = PAD) -> dict[str, Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[padding] * (width - len(row)) + row for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != padding).long()}


PROMPTS = [
    [BOS, 5, OPEN, 11, 20, 31, CLOSE, 3],  # an item, then text
    [BOS, OPEN],
    [BOS, 4, 4, OPEN, 12, 21, 30, CLOSE, 4, 6, OPEN, 13],
]


def through(processors: list[LogitsProcessor], ids: Tensor, scores: Tensor) -> Tensor:
    for processor in processors:
        scores = processor(ids, scores)
    return scores


def chat_processors() -> tuple[list[LogitsProcessor], list[LogitsProcessor]]:
    return [
        SequenceBiasLogitsProcessor(CHAT["sequence_bias"]),
        RepetitionPenaltyLogitsProcessor(CHAT["repetition_penalty"]),
        NoRepeatNGramLogitsProcessor(CHAT["no_repeat_ngram_size"]),
        SuppressTokensLogitsProcessor(CHAT["suppress_tokens"]),
    ], [
        TemperatureLogitsWarper(CHAT["temperature"]),
        TopKLogitsWarper(CHAT["top_k"]),
        TopPLogitsWarper(CHAT["top_p"]),
    ]


def set_chat(model: PreTrainedModel) -> None:
    for name, value in CHAT.items():
        setattr(model.generation_config, name, value)


@pytest.mark.parametrize("kind", ["llama", "transformer"])
@pytest.mark.parametrize("sample", [True, False])
def test_a_chat_configuration_reaches_the_text_and_no_span(
    kind: str, sample: bool, make_model: Make, item_tokens: Tensor
) -> None:
    """Each step's scores: the raw logits of legal tokens inside, the stock processors outside."""
    torch.manual_seed(0)
    model, trie, items = make_model(kind), ItemTrie(item_tokens), spelt(item_tokens)
    set_chat(model)
    inputs, repeats, new = pad_left(PROMPTS), 3 if sample else 1, 40
    length = inputs["input_ids"].shape[1]
    excluded = [np.array([0]), np.arange(40), np.array([8, 9])]
    keep = build_filter(trie, excluded)
    processor = TextTrieLogitsProcessor(trie, length, new, OPEN, CLOSE, keep, no_repeat=True)
    out = model.generate(
        **inputs,
        num_return_sequences=repeats,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **processor.generate_options(model, do_sample=sample),
    )
    penalties, warpers = chat_processors()
    seen, spans = {"inside": 0, "outside": 0, "bent": 0}, 0
    for at, sequence in enumerate(out.sequences.tolist()):
        prompt = PROMPTS[at // repeats]
        kept = set(range(len(items))) - set(excluded[at // repeats].tolist())
        padding = length - len(prompt)
        for step in range(new):
            ids = sequence[: length + step]
            right = sorted(legal(ids, length, new, items, kept, no_repeat=True))
            wanted = torch.full((VOCABULARY,), -torch.inf)
            logits = out.logits[step][at]
            if read(ids)[1] is None:
                unpadded = torch.tensor([ids[padding:]])
                bent = through(penalties, unpadded, logits[None])
                wanted[right] = bent[0, right]
                if sample:
                    wanted = through(warpers, unpadded, wanted[None])[0]
                seen["outside"] += 1
                seen["bent"] += not torch.equal(bent[0], logits)
            else:
                wanted[right] = logits[right]
                seen["inside"] += 1
            torch.testing.assert_close(out.scores[step][at], wanted)
            assert sequence[length + step] in right
        whole, rest = read(sequence)
        answer = [codes for end, codes in whole if end >= length]
        assert rest is None
        assert set(answer) <= {items[row] for row in kept}
        assert len(set(answer)) == len(answer)
        spans += len(answer)
    assert min(seen["inside"], seen["outside"], seen["bent"], spans) >= 5


def test_sampling_draws_items_from_the_conditional_distribution(
    make_model: Make, item_tokens: Tensor, brute_force: Callable[..., Tensor]
) -> None:
    """p(item) from the scores of the steps is p(item) renormalised code by code, as by hand."""
    torch.manual_seed(1)
    model, trie, items = make_model("llama"), ItemTrie(item_tokens), spelt(item_tokens)
    set_chat(model)
    prompt = torch.tensor([[BOS, 5, OPEN]])
    processor = TextTrieLogitsProcessor(trie, 3, 4, OPEN, CLOSE)
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        num_return_sequences=20,
        return_dict_in_generate=True,
        output_scores=True,
        **processor.generate_options(model),
    )
    ids = sorted(set(items))
    for at, sequence in enumerate(out.sequences[:, 3:].tolist()):
        got = sum(
            float(out.scores[step][at].log_softmax(-1)[token])
            for step, token in enumerate(sequence[:3])
        )
        wanted = 0.0
        for depth in range(3):
            begun = tuple(sequence[:depth])
            siblings = sorted({i[depth] for i in ids if i[:depth] == begun})
            rows = torch.tensor([[*begun, code] for code in siblings])
            share = brute_force(model, prompt[0], rows).softmax(0)
            wanted += float(share[siblings.index(sequence[depth])].log())
        assert got == pytest.approx(wanted, abs=1e-4)
    assert len({tuple(row) for row in out.sequences.tolist()}) > 5  # top_k is 1 outside


@pytest.mark.parametrize("renormalize", [False, True])
def test_beams_sum_the_models_own_log_probabilities(
    renormalize: bool,
    make_model: Make,
    item_tokens: Tensor,
    brute_force: Callable[..., Tensor],
) -> None:
    """One span, and beams enough for the whole catalogue: every item with its score, once."""
    model, trie, items = make_model("llama"), ItemTrie(item_tokens), spelt(item_tokens)
    set_chat(model)
    prompts = [[BOS, 5, 3, OPEN], [BOS, 10, 20, OPEN]]
    kept = set(range(10, 60))
    keep = build_filter(trie, [np.arange(10)])
    processor = TextTrieLogitsProcessor(trie, 4, 4, OPEN, CLOSE, keep)
    out = model.generate(
        **pad_left(prompts),
        num_return_sequences=64,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
        **processor.generate_options(
            model, num_beams=64, do_sample=False, renormalize_logits=renormalize
        ),
    )
    for row, prompt in enumerate(prompts):
        ids = sorted({items[at] for at in kept})
        spans = torch.tensor([[*item, CLOSE] for item in ids])
        scores = brute_force(model, torch.tensor(prompt), spans).tolist()
        wanted = dict(zip(ids, scores, strict=True))
        got = {}
        for at in range(row * 64, (row + 1) * 64):
            if out.sequences_scores[at] > -1e8:
                *item, close = out.sequences[at, 4:].tolist()
                assert close == CLOSE
                assert tuple(item) not in got
                got[tuple(item)] = float(out.sequences_scores[at])
        assert got.keys() == wanted.keys()
        assert all(got[item] == pytest.approx(wanted[item], abs=1e-4) for item in got)


@pytest.mark.parametrize("sample", [False, True])
def test_beams_in_text_hold_whole_items_and_unchanged_scores(
    sample: bool, make_model: Make, item_tokens: Tensor
) -> None:
    torch.manual_seed(2)
    model, trie, items = make_model("llama"), ItemTrie(item_tokens[:3]), spelt(item_tokens[:3])
    # More beams than items: dead ones must not break the warpers, which need entropies.
    warpers = {"top_h": 0.9, "eta_cutoff": 1e-3, "typical_p": 0.99} if sample else {}
    inputs, new = pad_left([[BOS, OPEN], [BOS, 5]]), 24
    processor = TextTrieLogitsProcessor(trie, 2, new, OPEN, CLOSE, no_repeat=True)
    out = model.generate(
        **inputs,
        num_return_sequences=6,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
        **processor.generate_options(
            model, num_beams=6, do_sample=sample, eos_token_id=EOS, top_k=0, **warpers
        ),
    )
    alive, count = 0, 0
    for sequence, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        if score < -1e8:
            continue
        alive += 1
        if EOS in sequence:
            sequence = sequence[: sequence.index(EOS) + 1]
        spans, rest = read(sequence)
        assert rest is None
        assert {codes for _, codes in spans} <= set(items)
        count += len(spans)
        with torch.no_grad():
            logits = model(torch.tensor([sequence])).logits[0].log_softmax(-1)
        steps = [float(logits[at - 1, sequence[at]]) for at in range(2, len(sequence))]
        assert score == pytest.approx(sum(steps), abs=1e-3)
    assert alive >= 7
    assert count >= 6


SETTINGS: list[dict[str, Any]] = [
    {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    {"do_sample": True, "temperature": 9.0},  # stock has a top_k of 50 of its own
    {"do_sample": True, "top_k": 7, "top_p": 0.8, "temperature": 1.4, "min_p": 0.02},
    {"do_sample": True, "top_k": None, "typical_p": 0.7, "epsilon_cutoff": 3e-3},
    {"do_sample": True, "top_h": 0.6, "eta_cutoff": 2e-2, "repetition_penalty": 1.5},
    {"do_sample": False, "num_beams": 4, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    {"do_sample": False, "num_beams": 3, "renormalize_logits": True, "sequence_bias": [[[5], 1.0]]},
    {"do_sample": True, "num_beams": 3, "top_k": 1, "top_p": 0.3, "eos_token_id": [2, 3]},
    {"do_sample": True, "bad_words_ids": [[4], [5, 6]], "begin_suppress_tokens": [7]},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(s))
def test_text_without_spans_is_what_stock_generate_writes(
    settings: dict[str, Any], make_model: Make
) -> None:
    """No item is left, so the text must be that of stock, told to leave the tokens of items out."""
    free = 60  # more than stock's own top_k
    items = torch.tensor([[free + 1, free + 3], [free + 2, free + 4]])
    trie = ItemTrie(items)
    model = make_model("llama", vocab_size=free + 6)
    model.generation_config.eos_token_id = EOS
    prompt = torch.tensor([[BOS, 5, OPEN, 11, CLOSE, 6], [BOS, 7, 7, 4, 4, 4]])
    common = {"attention_mask": torch.ones_like(prompt), "min_new_tokens": 3}
    keep = RowFilter.only([np.array([], dtype=np.int64)], 2, trie.device)
    processor = TextTrieLogitsProcessor(trie, 6, 20, OPEN, CLOSE, keep)
    torch.manual_seed(4)
    stock = model.generate(
        prompt,
        max_new_tokens=20,
        suppress_tokens=[OPEN, CLOSE, *range(free + 1, free + 5)],
        **common,
        **settings,
    )
    torch.manual_seed(4)
    ours = model.generate(prompt, **common, **processor.generate_options(model, **settings))
    assert torch.equal(ours, stock)
    # And the same when the settings are those of the model.
    for name, value in settings.items():
        if value is not None:
            setattr(model.generation_config, name, value)
    changes = {name: value for name, value in settings.items() if value is None}
    torch.manual_seed(4)
    again = model.generate(prompt, **common, **processor.generate_options(model, **changes))
    assert torch.equal(again, stock)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_an_answer_does_not_depend_on_padding_or_batch(
    num_beams: int, make_model: Make, item_tokens: Tensor
) -> None:
    """Padded with the end token, as chat models are, which a repetition penalty would notice."""
    model, trie = make_model("llama"), ItemTrie(item_tokens)
    set_chat(model)
    model.generation_config.update(eos_token_id=EOS, pad_token_id=EOS, repetition_penalty=5.0)
    model.generation_config.sequence_bias = [[[OPEN], 6.0]]
    prompts = [*PROMPTS, [BOS, 7], [BOS, 40]]
    excluded: list[Any] = [np.array([0, 1]), np.array([2]), *[np.arange(30)] * 3]

    def answers(rows: slice) -> list[list[int]]:
        inputs = pad_left(prompts[rows], EOS)
        length = inputs["input_ids"].shape[1]
        keep = build_filter(trie, excluded[rows])
        processor = TextTrieLogitsProcessor(trie, length, 25, OPEN, CLOSE, keep, no_repeat=True)
        options = processor.generate_options(model, do_sample=False, num_beams=num_beams)
        out = model.generate(**inputs, **options)[:, length:].tolist()
        return [row[: row.index(EOS)] if EOS in row else row for row in out]

    together = answers(slice(None))
    assert together == [answers(slice(row, row + 1))[0] for row in range(len(prompts))]
    assert sum(row.count(CLOSE) for row in together) >= 3
    assert len({len(row) for row in together}) > 1


def test_no_repeat_names_each_id_once_and_then_opens_no_span(make_model: Make) -> None:
    items = torch.tensor([[10, 20], [10, 20], [10, 21], [11, 20]])  # two share an ID
    trie, model = ItemTrie(items), make_model("llama")
    eager = {"sequence_bias": [[[OPEN], 100.0]], "do_sample": False}
    prompt = torch.tensor([[BOS, OPEN, 10, 21, CLOSE, OPEN], [BOS, 3, 3, 3, 3, OPEN]])
    spans = []
    for excluded, no_repeat in ((None, True), ([np.array([0])], True), (None, False)):
        keep = build_filter(trie, excluded)
        processor = TextTrieLogitsProcessor(trie, 6, 40, OPEN, CLOSE, keep, no_repeat)
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            **processor.generate_options(model, **eager),
        )
        spans.append([[c for end, c in read(row)[0] if end >= 6] for row in out.tolist()])
    # The item of the prompt's history is named again; the shared ID stands for both its items.
    for row in (*spans[0], *spans[1]):
        assert sorted(row) == [(10, 20), (10, 21), (11, 20)]
    assert [len(row) for row in spans[2]] == [10, 10]  # 40 tokens of nothing else


@pytest.mark.parametrize(
    "tokens", [[[10, 20, 30]], [[10], [11]], [[10], [10]]], ids=["one", "atomic", "shared"]
)
@pytest.mark.parametrize("num_beams", [1, 7])
def test_tiny_catalogues(tokens: list[list[int]], num_beams: int, make_model: Make) -> None:
    trie, model = ItemTrie(torch.tensor(tokens)), make_model("llama")
    levels = trie.levels
    processor = TextTrieLogitsProcessor(trie, 2, levels + 1, OPEN, CLOSE)
    out = model.generate(
        torch.tensor([[BOS, OPEN]]),
        attention_mask=torch.ones(1, 2),
        **processor.generate_options(model, num_beams=num_beams, do_sample=False),
    )
    assert read(out[0].tolist())[0][-1][1] in {tuple(row) for row in tokens}


def test_an_answer_that_was_begun_elsewhere_may_repeat_itself() -> None:
    """Repetitions, forbidden items and spans that are no items count once or not at all."""
    tokens = torch.tensor([[10, 20], [10, 21], [11, 20], [11, 22], [12, 20]])
    trie, items = ItemTrie(tokens), spelt(tokens)
    keep = build_filter(trie, [np.array([3])])
    twice = [OPEN, 10, 20, CLOSE, OPEN, 10, 20, CLOSE]
    for odd in ([OPEN, 11, 22, CLOSE], [OPEN, CLOSE], [11, 20, CLOSE], [OPEN, 11, 11, 20, CLOSE]):
        for end in ([OPEN], [OPEN, 10], [OPEN, 11], [OPEN, 12, 20], []):
            ids = [BOS, *twice, *odd, *end]
            processor = TextTrieLogitsProcessor(trie, 1, 40, OPEN, CLOSE, keep, no_repeat=True)
            masked = processor(torch.tensor([ids]), torch.zeros(1, VOCABULARY))
            assert allowed(masked) == [legal(ids, 1, 40, items, {0, 1, 2, 4}, no_repeat=True)]
    for start in ([], [5], [OPEN, CLOSE]):  # an end that nothing began
        ids = [*start, 10, 20, CLOSE, OPEN, 10]
        processor = TextTrieLogitsProcessor(trie, 0, 40, OPEN, CLOSE, keep, no_repeat=True)
        assert allowed(processor(torch.tensor([ids]), torch.zeros(1, VOCABULARY))) == [{20, 21}]


def test_a_span_needs_room_to_end(item_tokens: Tensor) -> None:
    trie = ItemTrie(item_tokens)
    processor = TextTrieLogitsProcessor(trie, 1, 6, OPEN, CLOSE)
    for generated, opens in ((0, True), (1, True), (2, False), (5, False)):
        ids = torch.full((1, 1 + generated), 3)
        assert (OPEN in allowed(processor(ids, torch.zeros(1, VOCABULARY)))[0]) == opens
    with pytest.raises(ValueError, match="6 tokens were generated: max_new_tokens is 6"):
        processor(torch.full((1, 7), 3), torch.zeros(1, VOCABULARY))


def test_tokens_of_items_outside_spans_are_a_choice(item_tokens: Tensor) -> None:
    trie, ids = ItemTrie(item_tokens), torch.full((1, 3), 3)
    codes = {code for item in spelt(item_tokens) for code in item}
    everything = set(range(VOCABULARY))
    for inside_only, barred in (
        (None, codes),
        (torch.tensor([], dtype=torch.int64), set()),
        (torch.arange(10, 48), set(range(10, 48))),
    ):
        processor = TextTrieLogitsProcessor(trie, 3, 9, OPEN, CLOSE, inside_only=inside_only)
        # Two columns more than tokens, as padded vocabularies have.
        masked = processor(ids, torch.zeros(1, VOCABULARY + 2))
        assert allowed(masked) == [(everything - barred - {CLOSE}) | {48, 49}]


def test_no_tokens_yet(item_tokens: Tensor) -> None:
    """As with ``inputs_embeds``, where generate hands over no prompt."""
    trie = ItemTrie(item_tokens)
    processor = TextTrieLogitsProcessor(trie, 0, 9, OPEN, CLOSE, no_repeat=True)
    empty = torch.empty(2, 0, dtype=torch.int64)
    codes = {code for item in spelt(item_tokens) for code in item}
    masked = processor(empty, torch.zeros(2, VOCABULARY))
    assert allowed(masked) == [set(range(VOCABULARY)) - codes - {CLOSE}] * 2


def test_own_processors_can_be_kept_outside_spans() -> None:
    """Rows inside keep their scores, and what is shown of them is finite."""

    class Refuses(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            assert scores.isfinite().all()
            return scores - 1.0

    rows = torch.tensor([[3, OPEN], [OPEN, CLOSE], [CLOSE, 3]])
    scores = torch.tensor([[-torch.inf, -torch.inf], [0.0, 1.0], [2.0, 3.0]])
    got = OutsideSpans(OPEN, CLOSE, [Refuses(), Refuses()])(rows, scores)
    assert got.tolist() == [[-torch.inf, -torch.inf], [-2.0, -1.0], [0.0, 1.0]]


def test_settings_that_would_reach_into_spans_are_refused(
    make_model: Make, item_tokens: Tensor
) -> None:
    model = make_model("llama")
    processor = TextTrieLogitsProcessor(ItemTrie(item_tokens), 2, 9, OPEN, CLOSE)
    for name, value, off in (
        ("guidance_scale", 1.5, 1.0),
        ("encoder_repetition_penalty", 1.2, 1.0),
        ("encoder_no_repeat_ngram_size", 2, 0),
        ("forced_eos_token_id", 2, None),
        ("forced_bos_token_id", 1, None),
    ):
        setattr(model.generation_config, name, value)
        with pytest.raises(ValueError, match=f"{name} is {value}.*pass {name}={off}"):
            processor.generate_options(model)
        assert processor.generate_options(model, **{name: off})[name] == off
        setattr(model.generation_config, name, None)
    with pytest.raises(ValueError, match="max_new_tokens is among the settings"):
        processor.generate_options(model, max_new_tokens=3)
    options = processor.generate_options(model, length_penalty=0.5, top_p=0.5)
    assert (options["length_penalty"], options["top_p"]) == (0.5, 1.0)


def test_wrong_use_is_named(item_tokens: Tensor) -> None:
    trie = ItemTrie(item_tokens)

    def make(*args: Any, **options: Any) -> TextTrieLogitsProcessor:
        return TextTrieLogitsProcessor(trie, *args, **options)

    with pytest.raises(ValueError, match=r"close_token_id is 20: wanted .* part of no item"):
        make(2, 9, OPEN, 20)
    with pytest.raises(ValueError, match="open_token_id is -1"):
        make(2, 9, -1, CLOSE)
    with pytest.raises(ValueError, match="both 8"):
        make(2, 9, OPEN, OPEN)
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        make(2, 0, OPEN, CLOSE)
    with pytest.raises(ValueError, match="inside_only holds -100"):
        make(2, 9, OPEN, CLOSE, inside_only=torch.tensor([-100]))
    with pytest.raises(ValueError, match="keep is over 7 items: wanted the trie's 60"):
        make(2, 9, OPEN, CLOSE, RowFilter.everything(7, trie.device))
    prompt, scores = torch.tensor([[1, 3, 3], [1, OPEN, 10]]), torch.zeros(2, VOCABULARY)
    with pytest.raises(ValueError, match="prompt_length is 4"):
        make(4, 9, OPEN, CLOSE)(prompt, scores)
    with pytest.raises(ValueError, match="scores have 30 columns: wanted 36 or more"):
        make(3, 9, OPEN, CLOSE)(prompt, scores[:, :30])
    with pytest.raises(ValueError, match="a multiple of the filter's 3 requests"):
        make(3, 9, OPEN, CLOSE, build_filter(trie, [np.array([1])] * 3))(prompt, scores)
    with pytest.raises(ValueError, match=r"max_new_tokens is 2: row 1 .* wanted the 3"):
        make(3, 2, OPEN, CLOSE)(prompt, scores)
    make(3, 3, OPEN, CLOSE)(prompt, scores)
    short = ItemTrie(torch.tensor([[10, -1], [11, 20]]))
    TextTrieLogitsProcessor(short, 3, 1, OPEN, CLOSE)(prompt, scores)  # a whole item already
    for codes in ([3], [20], [10, 20, 30, 30]):
        ids = torch.tensor([[1, OPEN, *codes]])
        with pytest.raises(
            ValueError, match="row 0 of the prompt ends in the span opened at token 1"
        ):
            make(ids.shape[1], 9, OPEN, CLOSE)(ids, scores[:1])
    none = build_filter(trie, [np.arange(60)])
    with pytest.raises(ValueError, match=r"row 1 .* the beginning of a permitted item"):
        make(3, 9, OPEN, CLOSE, none)(prompt, scores)
