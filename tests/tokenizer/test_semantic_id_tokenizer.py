import copy
import json
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from gr.data.schema import Event
from gr.tokenizer import Catalog, SemanticIdTokenizer, SidVocabulary, register

CATALOG = Catalog(
    ["a", "b", "c", "d"],
    np.array([[0, 0, -1], [3, 2, -1], [4, 1, 1], [0, 0, -1]], dtype=np.int32),
    {"item": (4, 3), "artist": (5, 2, 2)},
    item_types=["item", "item", "artist", "item"],
    popularity=np.array([1, 2, 3, 9]),
)


@pytest.fixture(scope="module")
def tokenizer() -> SemanticIdTokenizer:
    register()
    return SemanticIdTokenizer.from_catalog(CATALOG)


def test_is_a_fast_tokenizer_with_the_vocabularys_ids(tokenizer: SemanticIdTokenizer) -> None:
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokens = tokenizer.vocabulary.tokens()
    assert len(tokenizer) == len(tokens)
    assert tokenizer.convert_tokens_to_ids(tokens) == list(range(len(tokens)))
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id) == (0, 1)
    assert (tokenizer.sep_token_id, tokenizer.unk_token_id) == (2, 3)


def test_text_round_trip(tokenizer: SemanticIdTokenizer) -> None:
    events = [Event("a", "like", 5), Event("c", None, 6), Event("b", "dislike", 6)]
    ids = tokenizer.encode_history(events).input_ids.tolist()
    text = tokenizer.decode(ids)
    assert text == (
        "[BOS] <item:0:0> <item:1:0> <action:like> <artist:0:4> <artist:1:1> <artist:2:1> "
        "[UNK] <item:0:3> <item:1:2> <action:dislike>"
    )
    assert tokenizer(text)["input_ids"] == ids
    assert tokenizer(text.replace(" ", ""))["input_ids"] == ids
    assert tokenizer("<item:0:0> <item:0:9>")["input_ids"] == [6, 3]


def test_history_tokens_times_and_unknown_items(tokenizer: SemanticIdTokenizer) -> None:
    history = tokenizer.encode_history(
        [Event("zz", "like", 4), Event("a", "like", 5), Event("b", None, 6), Event("zz", None, 7)]
    )
    like = tokenizer.vocabulary.action_token("like")
    item = tokenizer.vocabulary.item_tokens([[0, 0], [3, 2]])
    assert history.input_ids.tolist() == [1, *item[0], like, *item[1], tokenizer.unk_token_id]
    assert history.timestamps.tolist() == [5, 5, 5, 5, 6, 6, 6]
    assert history.unknown == ["zz", "zz"]


def test_plain_ids_and_empty_history(tokenizer: SemanticIdTokenizer) -> None:
    plain = tokenizer.encode_history(["a", "b", "c"], max_events=1)
    item = tokenizer.encode_items(["c"])[0]
    assert plain.input_ids.tolist() == [1, *item[item >= 0], tokenizer.unk_token_id]
    assert plain.timestamps.tolist() == [0] * len(plain.input_ids)
    empty = tokenizer.encode_history([])
    assert empty.input_ids.tolist() == [1] and empty.timestamps.tolist() == [0]


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([Event("a", "share", 5)], r"events\[0\] has action 'share'"),
        ([Event("a", None, 5), Event("a")], r"events\[1\] has no timestamp while 1 of 2"),
        ([Event("a", None, 5), Event("a", None, 4)], r"events\[1\] has timestamp 4, before 5"),
        ([Event("a", None, 1_700_000_000_000)], "wanted seconds, not milliseconds"),
    ],
)
def test_bad_events_are_refused(
    tokenizer: SemanticIdTokenizer, events: list[Event], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tokenizer.encode_history(events)


def test_items_only_stream_ignores_actions() -> None:
    tokenizer = SemanticIdTokenizer.from_catalog(CATALOG, actions=())
    assert tokenizer.encode_history([Event("a", "share", 5)]).input_ids.tolist() == [1, 6, 10]


def test_items_and_back(tokenizer: SemanticIdTokenizer) -> None:
    tokens = tokenizer.encode_items(["a", "b", "c", "d"])
    assert tokens.shape == (4, 3)
    # a and d share an ID, and d is more popular.
    assert tokenizer.decode_items(tokens) == ["d", "b", "c", "d"]
    wrapped = np.column_stack([np.full(4, 4), tokens, np.full(4, 5)])
    assert tokenizer.decode_items(wrapped) == ["d", "b", "c", "d"]
    assert tokenizer.decode_items(np.stack([[0, 0, 0], tokens[1, ::-1]])) == [None, None]
    free = tokenizer.vocabulary.item_tokens([[1, 1]])
    assert tokenizer.decode_items(free) == [None]
    with pytest.raises(KeyError, match=r"item_ids\[1\] 'zz'"):
        tokenizer.encode_items(["a", "zz"])


def test_auto_tokenizer_round_trip(tokenizer: SemanticIdTokenizer, tmp_path: Path) -> None:
    for folder in (tmp_path / "first", tmp_path / "second"):
        tokenizer.save_pretrained(folder)
        loaded = AutoTokenizer.from_pretrained(folder)
        assert type(loaded) is SemanticIdTokenizer
        assert loaded.vocabulary == tokenizer.vocabulary
        assert loaded.get_vocab() == tokenizer.get_vocab()
        assert loaded.catalog is not None and loaded.catalog.item_ids == CATALOG.item_ids
        tokenizer = loaded  # the second folder is written by a loaded tokenizer
    config = json.loads((tmp_path / "second" / "tokenizer_config.json").read_text())
    assert config["sid_vocabulary"] == tokenizer.vocabulary.to_dict()
    assert not [name for name, value in config.items() if str(tmp_path) in str(value)]


def test_without_a_catalogue_it_says_what_is_missing(tmp_path: Path) -> None:
    vocabulary = SidVocabulary(CATALOG.level_sizes)
    SemanticIdTokenizer(sid_vocabulary=vocabulary.to_dict()).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.catalog is None
    with pytest.raises(ValueError, match="has no catalogue"):
        loaded.encode_history(["a"])
    other = Catalog(["a"], np.zeros((1, 1), dtype=np.int32), {"item": (4,)})
    with pytest.raises(ValueError, match="level sizes"):
        loaded.catalog = other
    with pytest.raises(ValueError, match="sid_vocabulary is missing"):
        SemanticIdTokenizer()


def test_ten_thousand_tokens_are_model_words_not_added_ones(
    tmp_path: Path, record_property: Any
) -> None:
    vocabulary = SidVocabulary({"item": (2500,) * 4}, ("like",))
    SemanticIdTokenizer(sid_vocabulary=vocabulary.to_dict()).save_pretrained(tmp_path)
    start = time.perf_counter()
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    record_property("load_seconds", time.perf_counter() - start)
    assert len(loaded) == 10_007
    # Added tokens are what makes loading slow: only the four named specials may be among them.
    assert len(loaded.added_tokens_decoder) <= 6


def test_copies_and_worker_processes_get_the_same_tokenizer(tokenizer: SemanticIdTokenizer) -> None:
    wanted = tokenizer.encode_history(["a", "c"]).input_ids
    for other in (copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert np.array_equal(other.encode_history(["a", "c"]).input_ids, wanted)
        assert other.get_vocab() == tokenizer.get_vocab()


def test_padding_is_on_the_left(tokenizer: SemanticIdTokenizer) -> None:
    batch = tokenizer.pad({"input_ids": [[1, 6, 9], [1]]}, return_tensors="np")
    assert batch["input_ids"].tolist() == [[1, 6, 9], [0, 0, 1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
