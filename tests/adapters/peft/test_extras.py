import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoTokenizer

from slora.text.chat_template import render_chat
from slora.text.tokenizer import Tokenizer
from slora_adapters.errors import AdapterInvalid
from slora_adapters.peft import extras as extras_module
from slora_adapters.peft.adapter import AdapterExtras, AdapterLimits
from slora_adapters.peft.extras import extend_tokenizer, list_added_tokens, read_added_tokens
from slora_adapters.peft.peft_directory import parse_adapter
from tests.adapters.hand_made import SHAPE, make_members, reason_codes
from tests.support.tiny_tokenizers import byte_fallback, byte_level, metaspace, write_tokenizer


def _extras(**files: str) -> AdapterExtras:
    members = {name: memoryview(raw) for name, raw in make_members(**files).items()}
    return parse_adapter(members, SHAPE, AdapterLimits()).extras


def test_texts_beside_the_weights_are_kept_as_they_are() -> None:
    extras = _extras(chat_template_dot_jinja="{{ messages }}é", generation_config_dot_json='{"top_p": 0.5}')
    assert extras == AdapterExtras("{{ messages }}é", '{"top_p": 0.5}')
    assert _extras() == AdapterExtras()


@pytest.mark.parametrize(
    "template",
    [
        "{{ m }}",
        [{"name": "rag", "template": "x"}, {"name": "default", "template": "{{ m }}"}],
        [{"name": ["unhashable"], "template": "x"}, {"name": "default", "template": "{{ m }}"}],
    ],
)
def test_the_template_of_a_tokenizer_config_is_found(template: object) -> None:
    assert (
        _extras(tokenizer_config_dot_json=json.dumps({"chat_template": template})).chat_template == "{{ m }}"
    )


def test_a_template_file_wins_over_the_tokenizer_config() -> None:
    extras = _extras(chat_template_dot_jinja="file", tokenizer_config_dot_json='{"chat_template": "config"}')
    assert extras.chat_template == "file"


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({"chat_template_dot_jinja": "x" * 101}, "extra_too_long"),
        ({"tokenizer_config_dot_json": json.dumps({"chat_template": "x" * 101})}, "extra_too_long"),
        ({"generation_config_dot_json": json.dumps({"a": "x" * 101})}, "extra_malformed"),
        ({"tokenizer_config_dot_json": "[]"}, "extra_malformed"),
        (
            {"tokenizer_config_dot_json": '{"added_tokens_decoder": {"64": {"content": "<new>"}}}'},
            "added_tokens",
        ),
        ({"added_tokens_dot_json": '{"<new>": 64}'}, "added_tokens"),
        ({"tokenizer_config_dot_json": '{"a": [{"b": ["\\uDFFF"]}]}'}, "extra_malformed"),
    ],
)
def test_texts_that_are_too_long_broken_or_add_tokens_are_refused(files: dict[str, str], code: str) -> None:
    assert code in reason_codes(make_members(**files), AdapterLimits(max_text_bytes=100, vocab_size=64))


def test_special_tokens_of_the_base_are_accepted() -> None:
    files = {
        "tokenizer_config_dot_json": '{"added_tokens_decoder": {"63": {"content": "<s>"}}}',
        "added_tokens_dot_json": '{"<s>": 63}',
    }
    assert reason_codes(make_members(**files), AdapterLimits(vocab_size=64)) == []


def test_a_lone_surrogate_is_refused_with_its_file_and_a_pair_of_them_is_accepted() -> None:
    """Born from an upload whose chat template answered every request with a 500."""
    lone = make_members(tokenizer_config_dot_json='{"chat_template": "a\\ud83d"}')
    with pytest.raises(AdapterInvalid, match=r"tokenizer_config.json .*lone surrogate U\+D83D"):
        parse_adapter({name: memoryview(raw) for name, raw in lone.items()}, SHAPE, AdapterLimits())
    paired = '{"chat_template": "a\\ud83d\\ude00"}'
    assert _extras(tokenizer_config_dot_json=paired).chat_template == "a\U0001f600"


CHAT = [{"role": "user", "content": "hello"}]
OWN_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    write_tokenizer(directory, byte_level())
    return directory


def _limits(base: Path) -> AdapterLimits:
    return AdapterLimits(
        vocab_size=500, base_directory=base, tokenizer_digests=Tokenizer.from_directory(base).digests
    )


def _read(base: Path, files: dict[str, str]) -> AdapterExtras:
    members = make_members() | {name: text.encode() for name, text in files.items()}
    views = {name: memoryview(raw) for name, raw in members.items()}
    return parse_adapter(views, SHAPE, _limits(base)).extras


def _saved(base: Path, directory: Path, **changes: object) -> dict[str, str]:
    """The files that transformers saves of the base's tokenizer with changes."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    for name, value in changes.items():
        if name == "added":
            tokenizer.add_special_tokens({"additional_special_tokens": value})
        else:
            setattr(tokenizer, name, value)
    tokenizer.save_pretrained(directory)
    return {path.name: path.read_text(encoding="utf-8") for path in directory.iterdir()}


def test_the_saved_tokenizer_of_the_base_changes_nothing(base: Path, tmp_path: Path) -> None:
    files = _saved(base, tmp_path)
    assert _read(base, files) == AdapterExtras(files["chat_template.jinja"])
    del files["chat_template.jinja"]
    assert _read(base, files) == AdapterExtras()


def test_the_special_tokens_of_an_adapter_are_those_of_its_template_and_its_end_token_stops(
    base: Path, tmp_path: Path
) -> None:
    """Born from a bug: the base's tokens were in the adapter's template, and its end token did not end answers."""
    stop = AutoTokenizer.from_pretrained(base).convert_tokens_to_ids("<|user|>")
    names = {"eos_token": "<|user|>", "bos_token": "<|system|>", "chat_template": OWN_TEMPLATE}
    files = _saved(base, tmp_path, **names)
    extras = _read(base, files | {"generation_config.json": '{"eos_token_id": 1, "top_p": 0.5}'})
    special = Tokenizer.from_directory(base).special_tokens
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(CHAT, tokenize=False)
    assert extras.chat_template is not None and expected == "<|system|>hello<|user|>"
    assert render_chat(extras.chat_template, CHAT, special, {}) == expected
    assert json.loads(extras.generation_config or "") == {"eos_token_id": [1, stop], "top_p": 0.5}
    assert f"eos_token '<|user|>' (id {stop})" in extras.uses
    # Without a template of its own, the adapter's tokens are those of the base's template.
    own = _read(base, {"special_tokens_map.json": json.dumps({"eos_token": {"content": "<|user|>"}})})
    chat = [{"role": "user", "content": "hello, you tokenizer of mine"}]
    rendered = render_chat(own.chat_template or "", chat, special, {"add_generation_prompt": False})
    assert rendered == f"<s><|user|>{chat[0]['content']}<|user|>\n"
    assert json.loads(own.generation_config or "") == {"eos_token_id": [stop]}


TOOLS = "  {%- if tools %}\n[{{ tools }}]{% endif %}{{ messages[0].content }}\n\n"
PLAIN = "  {% set a = 1 %}\n{{ messages[0].content }}\n  "


@pytest.mark.parametrize("place", ["config", "folder", "chat_template.json"])
def test_the_template_for_tools_is_used_for_requests_with_tools(base: Path, place: str) -> None:
    listed = json.dumps(
        {
            "chat_template": [
                {"name": "default", "template": PLAIN},
                {"name": "tool_use", "template": TOOLS},
                {"name": "rag", "template": "x"},
            ]
        }
    )
    files = {
        "config": {"tokenizer_config.json": listed},
        "folder": {"chat_template.jinja": PLAIN, "additional_chat_templates/tool_use.jinja": TOOLS},
        "chat_template.json": {"chat_template.json": listed},
    }[place]
    extras = _read(base, files)
    assert extras.chat_template is not None
    for variables, template in (({}, PLAIN), ({"tools": ["x"]}, TOOLS)):
        expected = render_chat(template, CHAT, {}, variables)
        assert render_chat(extras.chat_template, CHAT, {}, variables) == expected
    assert any("'rag'" in use for use in extras.uses) == (place != "folder")


def test_the_template_of_a_processor_is_found(base: Path) -> None:
    extras = _read(base, {"chat_template.json": '{"chat_template": "{{ messages }}"}'})
    assert extras == AdapterExtras("{{ messages }}") and extras.uses == ("chat_template.json (default)",)


@pytest.mark.parametrize("names", [("tokenizer_config.json",), ("added_tokens.json",)])
def test_a_token_whose_settings_are_unknown_is_refused_by_name(
    base: Path, tmp_path: Path, names: tuple[str, ...]
) -> None:
    """Born from a bug: such a token was split into letters."""
    files = _saved(base, tmp_path, added=["<|call|>"])
    number = json.loads(files["tokenizer.json"])["added_tokens"][-1]["id"]
    files["added_tokens.json"] = json.dumps({"<|call|>": number})
    config = {"added_tokens_decoder": {str(number): {"content": "<|call|>"}}}
    files["tokenizer_config.json"] = json.dumps(config)
    with pytest.raises(
        AdapterInvalid, match=r"token \d+ of the adapter's tokenizer is '<\|call\|>', which the base"
    ):
        _read(base, {name: files[name] for name in names})
    # A token for padding is never needed.
    padded = {name: files[name] for name in names} | {"special_tokens_map.json": '{"pad_token": "<|call|>"}'}
    assert _read(base, padded).uses == ("not pad_token '<|call|>', because answers are not padded",)


def test_another_tokenizer_is_refused(base: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, byte_fallback(), None)
    with pytest.raises(AdapterInvalid, match=r"tokenizer.json splits texts into other tokens"):
        _read(base, {"tokenizer.json": (tmp_path / "tokenizer.json").read_text(encoding="utf-8")})
    with pytest.raises(AdapterInvalid, match=r"tokenizer.json is not a tokenizer"):
        _read(base, {"tokenizer.json": '{"a": 1}'})
    with pytest.raises(
        AdapterInvalid, match=r"eos_token is '<eos>', which the base model's tokenizer does not"
    ):
        _read(base, {"special_tokens_map.json": '{"eos_token": "<eos>"}'})


@pytest.mark.parametrize("splits", [True, False])
def test_a_tokenizer_that_splits_special_tokens_otherwise_is_refused(tmp_path: Path, splits: bool) -> None:
    """Born from a bug: the setting was ignored. transformers splits texts by it."""
    write_tokenizer(tmp_path, byte_level())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, split_special_tokens=not splits)
    tokenizer.save_pretrained(tmp_path)
    assert _read(tmp_path, _saved(tmp_path, tmp_path / "same")).generation_config is None
    files = _saved(tmp_path, tmp_path / "other")
    config = json.loads(files["tokenizer_config.json"]) | {"split_special_tokens": splits}
    other = AutoTokenizer.from_pretrained(tmp_path, split_special_tokens=splits)
    assert other("a</s>")["input_ids"] != Tokenizer.from_directory(tmp_path).encode("a</s>")
    named = f"has split_special_tokens: {str(splits).lower()}, and the base model's tokenizer has "
    with pytest.raises(AdapterInvalid, match=named):
        _read(tmp_path, files | {"tokenizer_config.json": json.dumps(config)})


def _add_plain(tokenizer: Any) -> None:
    tokenizer.add_tokens(["<think>", AddedToken("</think>", lstrip=True, rstrip=True, normalized=False)])


def _add_chat(tokenizer: Any) -> None:
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "pad_token": "<pad>"})


def _add_mixed(tokenizer: Any) -> None:
    """A plain token that a name makes special, and a token of the base's with other settings."""
    tokenizer.add_tokens(["<|im_end|>", AddedToken("word", single_word=True), "<think>"])
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>"]})


def _rename(tokenizer: Any) -> None:
    """What people do to the tokens that a base model reserves."""


def _add_usual(tokenizer: Any) -> None:
    """Tokens that occur in the texts by which tokenizers are compared. Born from a refusal of such uploads."""
    tokenizer.add_tokens(["fox", "the", AddedToken("\n", normalized=False), "a"])


WAYS = {
    **{"plain": _add_plain, "chat": _add_chat, "mixed": _add_mixed, "usual": _add_usual},
    "renamed": _rename,
}
OWN_TEXTS = [
    "a <think> b </think>  c<|im_start|>user\nhello<|im_end|>\n <pad>",
    "<think></think><think>  </think>word wordy <tool> x<tool>",
    "<|im_end|><|im_end|> é<|reserved_1|> <|reserved_0|><|user|>日本",
    "no added token here",
]


@pytest.mark.parametrize("make", [byte_level, byte_fallback, metaspace])
@pytest.mark.parametrize("way", WAYS)
def test_the_added_tokens_of_an_adapter_split_and_spell_texts_as_transformers_does(
    tmp_path: Path, way: str, make: Callable[[], FastTokenizer]
) -> None:
    fast = make()
    fast.add_tokens(["<tool>"])
    fast.add_special_tokens(["<|reserved_0|>", "<|reserved_1|>"])
    write_tokenizer(tmp_path / "base", fast)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    WAYS[way](tokenizer)
    tokenizer.save_pretrained(tmp_path / "own")
    files = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "own").iterdir()}
    if way == "renamed":
        files = {name: text.replace("reserved_1", "im_end") for name, text in files.items()}
        for name, text in files.items():
            (tmp_path / "own" / name).write_text(text, encoding="utf-8")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "own")
    base, extras = Tokenizer.from_directory(tmp_path / "base"), _read(tmp_path / "base", files)
    tokens = read_added_tokens(extras.generation_config)
    ours = base.with_added_tokens(tokens)
    assert tokens and any(use.startswith("added tokens '") for use in extras.uses)
    for text in OWN_TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        for skips in (True, False):
            decoded = theirs.decode(ids, skip_special_tokens=skips)
            assert ours.decode(ids, skip_special_tokens=skips) == decoded
            decoder = ours.start_decoding(skip_special_tokens=skips)
            assert "".join(map(decoder.push, [[i] for i in ids])) + decoder.finish() == decoded
        assert base.encode(text) == AutoTokenizer.from_pretrained(tmp_path / "base")(text)["input_ids"]
    for token in tokens:
        assert ours.token_text(token.token_id) == theirs.decode([token.token_id])


def _as_decoder(tokenizer: Any, names: list[str]) -> dict[str, object]:
    added = (
        (str(number), json.loads(json.dumps(token.__getstate__()))) for number, token in tokenizer.items()
    )
    return {number: token for number, token in added if token["content"] in names}


NAMED = {
    "list": {"extra_special_tokens": ["<a>"]},
    "list of earlier releases": {"additional_special_tokens": ["<a>", "<b>"]},
    "table": {"extra_special_tokens": {"image_token": "<a>"}},
    "field": {"pad_token": "<b>"},
    "field of a class": {"image_token": "<b>"},
    "field, in the table of added tokens": {"eos_token": "<b>", "added": ["<a>", "<b>"]},
    "field, not in the table of added tokens": {"eos_token": "<b>", "added": ["<a>"]},
    "list of the map": {"map": {"additional_special_tokens": ["<a>"], "bos_token": "<s>"}},
    "field of the map": {"map": {"eos_token": "<a>"}, "pad_token": "<b>"},
    "field of the map in place of another": {"map": {"pad_token": "<a>"}, "pad_token": "<b>"},
    "map that is not read": {"map": {"eos_token": "<a>"}, "added": ["<a>", "<b>"]},
}


@pytest.mark.parametrize("way", NAMED)
def test_tokens_are_hidden_where_transformers_hides_them(base: Path, tmp_path: Path, way: str) -> None:
    """Tokens that tokenizer.json has as plain ones, and that other files name as special ones."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens([AddedToken("<a>", normalized=False), AddedToken("<b>")])
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8")) | NAMED[way]
    special, in_table = config.pop("map", None), config.pop("added", None)
    if in_table is not None:
        config["added_tokens_decoder"] = _as_decoder(tokenizer.added_tokens_decoder, in_table)
    if special is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(special), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    files = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    tokens = read_added_tokens(_read(base, files).generation_config)
    ours = Tokenizer.from_directory(base).with_added_tokens(tokens)
    for text in ("x<a>y", "x<b>y", "a <a> </s><b>"):
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"<|reserved_0|>": "x" * 129}, r"has 129 characters; an added token has 1 to 128"),
        ({"<|user|>": "<|call|>"}, r"takes the place of '<\|user\|>' in the base's tokenizer"),
        (
            {"<|reserved_0|>": "<x>", "<|reserved_1|>": "<|reserved_0|>"},
            r"which is id 376 in the base's tokenizer",
        ),
        (
            [f"<{number}>" for number in range(1025)],
            r"has 1025 added tokens that differ from the base's; accepted are at most 1024",
        ),
        (
            [f"<{number:126}>" for number in range(129)],
            r"the 129 added tokens .* have 16512 characters in all; accepted are at most 16384; shorten them",
        ),
    ],
)
def test_added_tokens_that_cannot_be_served_are_refused_by_name(
    tmp_path: Path, change: dict[str, str] | list[str], message: str
) -> None:
    fast = byte_level()
    fast.add_special_tokens(["<|reserved_0|>", "<|reserved_1|>"])
    write_tokenizer(tmp_path, fast)
    own = FastTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    if isinstance(change, list):
        own.add_tokens(change)
    saved = own.to_str()
    for before, after in change.items() if isinstance(change, dict) else ():
        saved = saved.replace(f'"{before}"', f'"{after}"')
    limits = replace(_limits(tmp_path), vocab_size=2000)
    members = make_members() | {"tokenizer.json": saved.encode()}
    with pytest.raises(AdapterInvalid, match=message):
        parse_adapter({name: memoryview(raw) for name, raw in members.items()}, SHAPE, limits)


class CountedLibrary:
    """A tokenizer of the library that counts the calls that add tokens, each of which builds its automata anew."""

    calls = 0

    def __init__(self, model: Any) -> None:
        object.__setattr__(self, "fast", FastTokenizer(model))

    def __getattr__(self, name: str) -> Any:
        CountedLibrary.calls += name in ("add_tokens", "add_special_tokens")
        return getattr(self.fast, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.fast, name, value)


def test_special_and_plain_tokens_in_turn_are_added_in_as_few_calls_as_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Born from a bug: an upload of 250 KB took a minute of CPU time."""
    monkeypatch.setattr(extras_module, "FastTokenizer", CountedLibrary)
    fast = byte_level()
    fast.add_tokens(["<tool>"])
    size = fast.get_vocab_size()
    tokens = [
        extras_module.AddedToken(
            size + number, f"<{number}>", special=number % 2 == 1, normalized=number % 3 == 1
        )
        for number in range(40)
    ]
    extended = extend_tokenizer(fast, tokens)
    assert list_added_tokens(extended) == [*list_added_tokens(fast), *tokens]
    assert CountedLibrary.calls == 2


def test_the_field_of_added_tokens_is_written_by_the_server_alone(base: Path) -> None:
    forged = '{"top_p": 0.5, "added_tokens": [{"token_id": 5, "content": "a"}]}'
    assert json.loads(_read(base, {"generation_config.json": forged}).generation_config or "") == {
        "top_p": 0.5
    }
    for listed in (
        "[1]",
        '[{"token_id": "5", "content": "a"}]',
        '[{"id": 5}]',
        "{}",
        '[{"token_id": 5, "content": ""}]',
    ):
        assert read_added_tokens(f'{{"added_tokens": {listed}}}') == ()
