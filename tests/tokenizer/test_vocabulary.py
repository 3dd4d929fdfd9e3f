import json

import numpy as np
import pytest

from gr.tokenizer import SidVocabulary

MIXED = SidVocabulary({"item": (4, 3), "artist": (5, 2, 2)}, ("like", "dislike"))


def test_ids_are_positions_in_the_token_list() -> None:
    tokens = MIXED.tokens()
    assert len(tokens) == MIXED.size == 6 + 7 + 9 + 2
    assert len(set(tokens)) == len(tokens)
    assert tokens[:6] == ["[PAD]", "[BOS]", "[SEP]", "[UNK]", "[SID]", "[/SID]"]
    assert tokens[MIXED.level_start("artist", 1)] == "<artist:1:0>"
    assert tokens[MIXED.action_token("dislike")] == "<action:dislike>"
    assert [tokens[i] for i in MIXED.action_tokens] == ["<action:like>", "<action:dislike>"]
    item = MIXED.item_tokens([[3, 2], [0, 1]], "item")
    assert [[tokens[i] for i in row] for row in item] == [
        ["<item:0:3>", "<item:1:2>"],
        ["<item:0:0>", "<item:1:1>"],
    ]


def test_mixed_types_round_trip() -> None:
    codes = np.array([[3, 2, -1], [4, 1, 0], [0, 0, -1]])
    tokens = MIXED.mixed_item_tokens(codes, [0, 1, 0])
    assert tokens[0, 2] == -1
    back, types = MIXED.token_codes(tokens)
    assert np.array_equal(back, codes)
    assert types.tolist() == [0, 1, 0]


def test_rows_that_are_no_semantic_id_have_no_type() -> None:
    item = MIXED.item_tokens([[3, 2]], "item")[0]
    artist = MIXED.item_tokens([[4, 1, 0]], "artist")[0]
    rows = [
        [item[0], artist[1], artist[2]],  # two types mixed
        [item[1], item[0], -1],  # levels swapped
        [artist[0], artist[1], -1],  # cut short
        [item[0], item[1], artist[2]],  # more tokens than the type has levels
        [0, 1, 2],  # specials
        [item[0], item[1], MIXED.action_token("like")],  # an action may follow
    ]
    assert MIXED.token_codes(rows)[1].tolist() == [-1, -1, -1, -1, -1, 0]


def test_groups_follow_types_and_levels() -> None:
    wanted = [0] * 6 + [1] * 4 + [2] * 3 + [3] * 5 + [4] * 2 + [5] * 2 + [6] * 2
    assert MIXED.groups().tolist() == wanted
    for name, sizes in MIXED.level_sizes.items():
        for level in range(len(sizes)):
            token = MIXED.level_start(name, level)
            assert MIXED.groups()[token] == MIXED.group(name, level)


def test_appended_vocabulary_starts_at_its_base() -> None:
    vocabulary = SidVocabulary({"item": (2, 2)}, ("like",), base=1000)
    assert vocabulary.specials == ("[SID]", "[/SID]")
    assert vocabulary.special_token("[SID]") == 1000
    assert vocabulary.level_start("item", 0) == 1002
    assert vocabulary.action_token("like") == 1006
    assert vocabulary.end == 1007
    assert len(vocabulary.groups()) == vocabulary.size == 7
    with pytest.raises(KeyError, match=r"\[PAD\]"):
        vocabulary.special_token("[PAD]")


def test_dict_form_keeps_type_order_through_sorted_json() -> None:
    vocabulary = SidVocabulary({"track": (2,), "artist": (3, 3)}, ("skip",), base=7)
    text = json.dumps(vocabulary.to_dict(), sort_keys=True)
    assert SidVocabulary.from_dict(json.loads(text)) == vocabulary
    assert SidVocabulary.from_dict(json.loads(text)).types == ("track", "artist")


@pytest.mark.parametrize(
    ("sizes", "actions", "message"),
    [
        ({}, (), "level_sizes is empty"),
        ({"a b": (2,)}, (), "'a b'"),
        ({"item": ()}, (), "wanted one or more sizes"),
        ({"item": (4, 0)}, (), r"\(4, 0\)"),
        ({"action": (4,)}, (), "taken by the action tokens"),
        ({"item": (4,)}, ("like", "like"), "repeat"),
        ({"item": (4,)}, ("<x>",), "'<x>'"),
    ],
)
def test_refuses(sizes: dict[str, tuple[int, ...]], actions: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SidVocabulary(sizes, actions)


def test_code_outside_its_level_is_named() -> None:
    with pytest.raises(ValueError, match=r"codes\[1, 1\] is 3.*'item' has 3 codes"):
        MIXED.item_tokens([[0, 0], [0, 3]], "item")
    with pytest.raises(KeyError, match="'film'"):
        MIXED.item_tokens([[0, 0]], "film")
    with pytest.raises(KeyError, match="'share'"):
        MIXED.action_token("share")
