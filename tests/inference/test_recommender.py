"""The public face, on random weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gr.data.schema import Event
from gr.inference import Recommender, Scored
from gr.tokenizer.trie import ItemTrie

Make = Callable[..., Any]
T0 = 10**9


def day(n: int) -> int:
    return T0 + 86_400 * n


HISTORIES: list[list[Any]] = [
    [Event("i1", "like", day(0)), Event("i2", "skip", day(1)), Event("i9", "like", day(1))],
    [],
    [Event("i4", "dislike", day(3))],
    ["i5", "i6", "i7", "i8"],
]


@pytest.fixture
def make_recommender(make_model: Make, make_tokenizer: Make) -> Callable[..., Recommender]:
    def make(
        kind: str = "hstu",
        sizes: tuple[int, ...] = (4, 5, 6),
        actions: tuple[str, ...] = ("like", "dislike", "skip"),
        options: dict[str, Any] | None = None,
        **rest: Any,
    ) -> Recommender:
        tokenizer = make_tokenizer(sizes, sizes[0] if len(sizes) == 1 else 30, actions)
        vocabulary = tokenizer.vocabulary
        extra = {} if kind == "llama" else {"vocabulary": vocabulary.to_dict()}
        model = make_model(kind, vocabulary.size, **extra, **(options or {}))
        return Recommender(model, tokenizer, **rest)

    return make


def names(answers: Sequence[Sequence[Scored]]) -> list[list[str]]:
    return [[scored.item_id for scored in answer] for answer in answers]


@pytest.mark.parametrize("kind", ["llama", "transformer", "hstu"])
@pytest.mark.parametrize("sizes", [(4, 5, 6), (30,)])
def test_retrieve_agrees_with_the_whole_catalogue(
    kind: str, sizes: tuple[int, ...], make_recommender: Callable[..., Recommender]
) -> None:
    rec = make_recommender(kind, sizes)
    scores = rec.score_catalog(HISTORIES)
    answers = rec.retrieve(HISTORIES, k=30, num_beams=100, exclude_seen=False)
    for row, answer in enumerate(answers):
        assert len({s.item_id for s in answer}) == len(answer) == 30
        assert [s.score for s in answer] == sorted((s.score for s in answer), reverse=True)
        for scored in answer:
            at = rec.catalog.item_ids.index(scored.item_id)
            assert scored.score == pytest.approx(float(scores[row, at]), abs=1e-4)


@pytest.mark.parametrize("kind", ["transformer", "hstu"])
def test_answers_do_not_depend_on_the_other_histories(
    kind: str, make_recommender: Callable[..., Recommender]
) -> None:
    rec = make_recommender(kind, options={"item_loss": "level"})
    asked: list[int | None] = [day(5), day(6), None, None]
    for ask in (rec.retrieve, rec.recommend):
        together = ask(HISTORIES, k=5, request_times=asked)
        for row, history in enumerate(HISTORIES):
            alone = ask([history], k=5, request_times=[asked[row]])[0]
            assert [s.item_id for s in alone] == [s.item_id for s in together[row]]
            for one, other in zip(alone, together[row], strict=True):
                assert one.score == pytest.approx(other.score, abs=1e-4)
    candidates = [["i3", "i1"], ["i0"], [], ["i7", "i8", "i9"]]
    ranked = rec.rank(HISTORIES, candidates, request_times=asked)
    for row, history in enumerate(HISTORIES):
        alone = rec.rank([history], [candidates[row]], request_times=[asked[row]])[0]
        assert names([alone]) == names([ranked[row]])
    rec.batch_size = 1
    assert names(rec.retrieve(HISTORIES, k=5, request_times=asked)) == names(
        make_recommender(kind, options={"item_loss": "level"}).retrieve(
            HISTORIES, k=5, request_times=asked
        )
    )


def test_seen_and_allowed(make_recommender: Callable[..., Recommender]) -> None:
    rec = make_recommender()
    seen = [{"i1", "i2", "i9"}, set(), {"i4"}, {"i5", "i6", "i7", "i8"}]
    for row, got in enumerate(names(rec.retrieve(HISTORIES, k=100))):
        assert set(got) == set(rec.catalog.item_ids) - seen[row]
    few = ["i1", "i3", "i5"]
    assert [set(got) for got in names(rec.retrieve(HISTORIES, k=10, allowed=few))] == [
        {"i3", "i5"},
        {"i1", "i3", "i5"},
        {"i1", "i3", "i5"},
        {"i1", "i3"},
    ]
    per_user = [["i1", "i2"], {"i0"}, None, few]
    chosen = [set(g) for g in names(rec.retrieve(HISTORIES, k=50, allowed=per_user))]
    assert chosen == [set(), {"i0"}, set(rec.catalog.item_ids) - {"i4"}, {"i1", "i3"}]
    assert names(rec.retrieve(HISTORIES, allowed=[])) == [[], [], [], []]
    assert names(rec.recommend(HISTORIES, allowed=["i1"])) == [[], ["i1"], ["i1"], ["i1"]]
    with pytest.raises(ValueError, match="allowed has 2 entries: wanted one for each of 4"):
        rec.retrieve(HISTORIES, allowed=[["i1"], ["i2"]])
    with pytest.raises(ValueError, match="allowed is the string 'i1'"):
        rec.retrieve(HISTORIES, allowed="i1")


def test_rank_is_the_probability_of_the_action(
    make_recommender: Callable[..., Recommender],
) -> None:
    rec = make_recommender("transformer")
    candidates = [f"i{n}" for n in range(12)]
    by_action = {
        action: rec.rank(HISTORIES, candidates, action=action) for action in rec.vocabulary.actions
    }
    for row in range(len(HISTORIES)):
        total: dict[str, float] = dict.fromkeys(candidates, 0.0)
        for answers in by_action.values():
            assert [s.score for s in answers[row]] == sorted(
                (s.score for s in answers[row]), reverse=True
            )
            for scored in answers[row]:
                total[scored.item_id] += scored.score
        assert list(total.values()) == pytest.approx([1.0] * 12, abs=1e-5)
    # One stream, spelled out: history, candidate, and the softmax over the three action tokens.
    encoded = rec.tokenizer.encode_history(HISTORIES[2])
    ids = np.concatenate([encoded.input_ids, rec.tokenizer.encode_items(["i3"])[0]])
    times = np.append(encoded.timestamps, [day(4)] * 3)
    with torch.no_grad():
        logits = rec.model(
            input_ids=torch.from_numpy(ids)[None],
            timestamps=torch.from_numpy(times)[None],
            request_times=torch.tensor([day(4)]),
        ).logits[0, -1]
    expected = logits[torch.from_numpy(rec.vocabulary.action_tokens)].softmax(0)[0]
    got = rec.rank([HISTORIES[2]], ["i3"], request_times=[day(4)])
    assert got[0][0].score == pytest.approx(float(expected), abs=1e-5)
    for one, other in zip(
        rec.rank(HISTORIES, candidates, microbatch=5), by_action["like"], strict=True
    ):
        assert names([one]) == names([other])
        assert [s.score for s in one] == pytest.approx([s.score for s in other], abs=1e-5)


@pytest.mark.parametrize("kind", ["llama", "hstu"])
def test_every_action_comes_from_one_pass(
    kind: str, make_recommender: Callable[..., Recommender]
) -> None:
    rec = make_recommender(kind)
    candidates = [["i3", "i1"], ["i2"], [], ["i5", "nobody", "i7", "i8"]]
    with pytest.warns(UserWarning, match="nobody"):
        probabilities = rec.action_probabilities(HISTORIES, candidates, microbatch=2)
    for number, action in enumerate(rec.vocabulary.actions):
        known = [[item for item in row if item != "nobody"] for row in candidates]
        ranked = rec.rank(HISTORIES, known, action)
        for row, answer in enumerate(ranked):
            assert probabilities[row].shape == (len(candidates[row]), 3)
            for scored in answer:
                at = candidates[row].index(scored.item_id)
                assert scored.score == pytest.approx(
                    float(probabilities[row][at, number]), abs=1e-6
                )
    assert probabilities[3][1].isnan().all()
    torch.testing.assert_close(probabilities[0].sum(1), torch.ones(2))


def test_weights_of_several_actions(make_recommender: Callable[..., Recommender]) -> None:
    rec = make_recommender()
    weights = {"like": 1.0, "skip": -0.5}
    [answer] = rec.rank(HISTORIES[:1], ["i3", "i1", "i4"], weights)
    [by_hand] = rec.action_probabilities(HISTORIES[:1], ["i3", "i1", "i4"])
    scores = by_hand[:, 0] - 0.5 * by_hand[:, 2]
    got = {scored.item_id: scored.score for scored in answer}
    torch.testing.assert_close(torch.tensor([got[i] for i in ("i3", "i1", "i4")]), scores)
    assert [s.score for s in answer] == sorted(got.values(), reverse=True)
    # One weight of 1 is the action itself, also where it stands beside the item.
    assert rec.recommend(HISTORIES, 3, {"skip": 1.0}) == rec.recommend(HISTORIES, 3, "skip")
    with pytest.raises(ValueError, match="wanted weights above 0"):
        rec.recommend(HISTORIES, 3, weights)
    with pytest.raises(ValueError, match="action is 'buy'"):
        rec.rank(HISTORIES, ["i1"], {"like": 1.0, "buy": 2.0})
    with pytest.raises(ValueError, match="wanted weights of one or more actions"):
        rec.rank(HISTORIES, ["i1"], {})


def test_recommend_is_the_probability_of_the_event(
    make_recommender: Callable[..., Recommender],
) -> None:
    rec = make_recommender()
    items = rec.score_catalog(HISTORIES)
    liked = rec.rank(HISTORIES, rec.catalog.item_ids, action="like")
    for weight in (0.0, 1.0, 2.5):
        for row, answer in enumerate(rec.recommend(HISTORIES, k=4, action_weight=weight)):
            chance = {s.item_id: s.score for s in liked[row]}
            joint = {
                item: float(items[row, at]) + weight * float(np.log(chance[item]))
                for at, item in enumerate(rec.catalog.item_ids)
                if item not in {e if isinstance(e, str) else e.item_id for e in HISTORIES[row]}
            }
            best = sorted(joint.values(), reverse=True)[:4]
            assert [s.score for s in answer] == pytest.approx(best, abs=1e-4)
            assert [joint[s.item_id] for s in answer] == pytest.approx(best, abs=1e-4)
    skipped = rec.recommend(HISTORIES, k=4, action="skip")
    assert skipped != rec.recommend(HISTORIES, k=4, action="like")


def test_a_stream_without_actions_retrieves_and_says_that_it_cannot_rank(
    make_recommender: Callable[..., Recommender],
) -> None:
    rec = make_recommender(actions=())
    assert rec.recommend(HISTORIES, k=5) == rec.retrieve(HISTORIES, k=5, num_beams=50)
    with pytest.raises(ValueError, match="ranking needs two or more"):
        rec.rank(HISTORIES, ["i1"])


def test_unknown_items_are_skipped_and_reported(
    make_recommender: Callable[..., Recommender],
) -> None:
    rec = make_recommender()
    with_unknown: list[list[Any]] = [["i1", "zzz", "i2", 77], ["i3"]]
    message = r"2 unknown items in histories \(first: histories\[0\], 'zzz'"
    with pytest.warns(UserWarning, match=message):
        got = rec.retrieve(with_unknown, k=3)
    assert rec.last_report.unknown_items == {0: ["zzz", "77"]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert got == rec.retrieve([["i1", "i2"], ["i3"]], k=3)
    assert rec.last_report.unknown_items == {}
    with pytest.warns(UserWarning, match="unknown items in candidates"):
        ranked = rec.rank([["i1"]], [["i2", "nope"]])
    assert names(ranked) == [["i2"]]
    assert rec.last_report.unknown_candidates == {0: ["nope"]}
    with pytest.warns(UserWarning, match="unknown items in allowed"):
        rec.retrieve([["i1"]], allowed=["i2", "nope"])
    with pytest.warns(UserWarning):
        assert rec.retrieve([["zzz"]], k=3)[0] == rec.retrieve([[]], k=3)[0]


def test_long_histories_keep_their_end(make_recommender: Callable[..., Recommender]) -> None:
    rec = make_recommender()
    long = [f"i{n % 30}" for n in range(200)]
    fits = rec.encoder.max_events
    assert fits is not None
    got = rec.retrieve([long], k=5, exclude_seen=False)
    assert rec.last_report.truncated == {0: 200 - fits}
    assert got == rec.retrieve([long[-fits:]], k=5, exclude_seen=False)
    assert rec.retrieve([long], k=5) == [[]]  # seen is the whole history, not what the model reads
    short = make_recommender(max_events=2)
    assert short.retrieve([long], k=5, exclude_seen=False) == short.retrieve(
        [long[-2:]], k=5, exclude_seen=False
    )


def test_missing_actions_stand_for_the_default_one(
    make_recommender: Callable[..., Recommender],
) -> None:
    rec = make_recommender(options={"item_loss": "level"})
    plain = rec.retrieve([["i1", "i2"]], k=5)
    assert plain == rec.retrieve([[Event("i1", "like"), Event("i2", "like")]], k=5)
    assert plain != rec.retrieve([[Event("i1", "skip"), Event("i2", "skip")]], k=5)
    stars = make_recommender(actions=("low", "high"))
    unknown = stars.retrieve([["i1"]])
    assert unknown[0] and unknown != stars.retrieve([[Event("i1", "high")]])
    with pytest.raises(ValueError, match=r"action is None: wanted one of \('low', 'high'\)"):
        stars.recommend([[]])
    assert make_recommender(actions=("low", "high"), default_action="high").recommend([["i1"]])


def test_a_missing_action_may_be_unknown_where_another_is_ranked(
    tmp_path: Path, make_recommender: Callable[..., Recommender]
) -> None:
    rec = make_recommender(missing_action="[UNK]")
    assert rec.default_action == "like"
    vocabulary = rec.vocabulary
    history: list[Any] = ["i1", Event("i2", "skip"), "i9"]
    ids = [vocabulary.special_token("[BOS]")]
    for item, action in (("i1", None), ("i2", "skip"), ("i9", None)):
        ids += rec.tokenizer.encode_items([item])[0].tolist()
        ids.append(vocabulary.action_token(action) if action else vocabulary.special_token("[UNK]"))
    ids += rec.tokenizer.encode_items(["i4"])[0].tolist()
    zeros = torch.zeros(1, len(ids), dtype=torch.int64)
    with torch.no_grad():
        logits = rec.model(input_ids=torch.tensor([ids]), timestamps=zeros).logits[0, -1]
    like = logits[torch.from_numpy(vocabulary.action_tokens)].softmax(0)[0]
    assert rec.rank([history], ["i4"])[0][0].score == pytest.approx(float(like), abs=1e-5)
    assert rec.rank([history], ["i4"]) == rec.rank([history], ["i4"], action="like")

    rec.save_pretrained(tmp_path)
    loaded = Recommender.from_pretrained(tmp_path)
    assert (loaded.default_action, loaded.missing_action) == ("like", "[UNK]")
    skip = make_recommender(missing_action="skip")
    named = [Event("i1", "skip"), Event("i2", "skip"), Event("i9", "skip")]
    assert skip.retrieve([history]) == make_recommender().retrieve([named])
    for name, wanted in (("default_action", "wanted one of"), ("missing_action", r"'\[UNK\]' or")):
        with pytest.raises(ValueError, match=f"{name} is 'love': .*{wanted}"):
            make_recommender(**{name: "love"})


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("hstu", {}),
        ("hstu", {"block_options": {"hstu": {"bias": "position"}}}),
        ("transformer", {}),
        ("llama", {}),
    ],
)
def test_no_time_has_passed_in_a_history_without_timestamps(
    kind: str,
    options: dict[str, Any],
    make_recommender: Callable[..., Recommender],
    brute_force: Callable[..., Tensor],
) -> None:
    """Beside timed histories as alone, and as whole forwards with every time 0."""
    rec = make_recommender(kind, options=options)
    events = [Event(f"i{n}", "dislike") for n in (5, 6, 7)]
    mixed: list[list[Any]] = [HISTORIES[0], events, [], HISTORIES[2]]
    together = rec.score_catalog(mixed, request_times=[day(2), None, None, day(9)])
    torch.testing.assert_close(together[1:2], rec.score_catalog([events]), atol=1e-5, rtol=0)
    items = torch.from_numpy(rec.tokenizer.encode_items(rec.catalog.item_ids))
    streams = [rec.tokenizer.encode_history(history) for history in mixed]
    reads_times = kind == "hstu" and not options
    for row, asked in ((0, day(2)), (1, 0), (2, 0), (3, day(9))):
        ids = torch.from_numpy(streams[row].input_ids)
        times = torch.from_numpy(streams[row].timestamps)
        given = {} if kind == "llama" else {"times": times, "asked": asked}
        scores = brute_force(rec.model, ids, items, **given)
        torch.testing.assert_close(together[row], scores, atol=1e-4, rtol=0)
        # The table has an entry for "at once", so no times at all are another question.
        blind = brute_force(rec.model, ids, items)
        assert ((scores - blind).abs().max() > 1e-2) == reads_times


def test_a_stranger_may_ask_at_any_time(make_recommender: Callable[..., Recommender]) -> None:
    rec = make_recommender()
    never, now = rec.score_catalog([[], []], request_times=[None, day(3)])
    assert torch.equal(never, now)


@pytest.mark.parametrize(
    ("histories", "asked", "message"),
    [
        (["i1", "i2"], None, r"histories\[0\] is 'i1': wanted a list of histories"),
        ([["i1"], "i12"], None, r"histories\[1\] is 'i12': wanted a list of histories"),
        ("i1", None, "histories is one history"),
        ([["i1"]], [1, 2], "request_times has 2 entries"),
        ([["i1"], None], None, r"histories\[1\] is None"),
        ([[]], [1000 * day(1)], r"request_times\[0\] is .*: wanted seconds, not milliseconds"),
        ([["i1"]], [day(1)], "has no timestamps: wanted both or neither"),
        ([[Event("i1", "like", day(3))]], [day(1)], r"request_times\[0\] is .* before the last"),
        ([[], [Event("i1", "love")]], None, r"histories\[1\]: events\[0\] has action 'love'"),
        ([[Event("i1", "like", 9), Event("i2", "like", 3)]], None, "sorted by time"),
    ],
)
def test_malformed_histories_are_named(
    histories: Any, asked: Any, message: str, make_recommender: Callable[..., Recommender]
) -> None:
    with pytest.raises(ValueError, match=message):
        make_recommender().retrieve(histories, request_times=asked)


@pytest.mark.parametrize("kind", ["transformer", "hstu"])
def test_saved_and_loaded(
    kind: str, tmp_path: Path, make_recommender: Callable[..., Recommender]
) -> None:
    rec = make_recommender(kind, default_action="skip", max_events=3)
    rec.save_pretrained(tmp_path / "model")
    loaded = Recommender.from_pretrained(tmp_path / "model")
    assert loaded.default_action == loaded.missing_action == "skip"
    for ask in (rec.retrieve, rec.recommend):
        again = loaded.retrieve if ask == rec.retrieve else loaded.recommend
        assert names(ask(HISTORIES, k=7)) == names(again(HISTORIES, k=7))
    assert sorted(p.suffix for p in (tmp_path / "model").iterdir() if "tmp" in p.name) == []

    # A trie of another catalogue beside this one is not believed.
    ItemTrie(torch.tensor([[1], [2]])).save(tmp_path / "model" / "trie.safetensors")
    rebuilt = Recommender.from_pretrained(tmp_path / "model")
    assert names(rebuilt.retrieve(HISTORIES, k=7)) == names(rec.retrieve(HISTORIES, k=7))
    with pytest.raises(FileNotFoundError, match="not a folder"):
        Recommender.from_pretrained(tmp_path / "nowhere")


def test_scores_of_the_catalogue_are_log_probabilities(
    make_recommender: Callable[..., Recommender],
) -> None:
    rec = make_recommender("hstu", (30,), options={"item_loss": "level"})
    scores: Tensor = rec.score_catalog(HISTORIES)
    torch.testing.assert_close(scores.exp().sum(1), torch.ones(4))
    assert rec.score_catalog([]).shape == (0, 30)
    assert rec.retrieve([]) == rec.rank([], []) == rec.recommend([]) == []


def test_recommenders_that_share_a_tokenizer_keep_their_own_items(
    make_recommender: Callable[..., Recommender], make_tokenizer: Make
) -> None:
    rec = make_recommender()
    before = rec.retrieve(HISTORIES, k=5)
    other = Recommender(rec.model, rec.tokenizer, catalog=make_tokenizer((4, 5, 6), 12).catalog)
    assert len(other.catalog) == 12 and len(rec.tokenizer.catalog or ()) == 30
    assert rec.retrieve(HISTORIES, k=5) == before


def test_single_ids_among_collections_are_refused(
    make_recommender: Callable[..., Recommender],
) -> None:
    """ "i12" is a collection of three strings to Python, and never what the caller means."""
    rec = make_recommender()
    with pytest.raises(ValueError, match=r"candidates\[1\] is 'i12': wanted a collection"):
        rec.rank([["i1"], ["i2"]], [["i1"], "i12"], "like")
    with pytest.raises(ValueError, match=r"allowed\[1\] is 'i12': wanted a collection"):
        rec.retrieve([["i1"], ["i2"]], allowed=[None, "i12"])


def test_more_items_than_any_memory_holds(make_recommender: Callable[..., Recommender]) -> None:
    rec = make_recommender()
    assert len(rec.retrieve([[]], k=10**12)[0]) == len(rec.recommend([[]], k=10**12)[0]) == 30


def test_a_folder_without_a_recommender_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no config.json: wanted a saved recommender"):
        Recommender.from_pretrained(tmp_path)
