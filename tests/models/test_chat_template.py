"""Chat templates: the text transformers renders, where templates are found, refusals, and programs that would not end."""

from __future__ import annotations

import datetime as dt
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from forebay.runtime.models import ChatTemplates, ModelConfig, Tokenizer
from forebay.specs.errors import InvalidInput, InvalidModel
from tests.models import tiny

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "hello wor <b>&'\" ä\n"}
ANSWER = {"role": "assistant", "content": "hell"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2.5, None, True]}}}],
}
TOOL = {"type": "function", "function": {"name": "add", "description": "ä <b>", "parameters": {"type": "object"}}}

TEMPLATES: Mapping[str, str] = {
    "chatml": (
        "{% for message in messages %}{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>' + '\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
    ),
    "llama2": (
        "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}"
        "{% else %}{% set rest = messages %}{% set system = false %}{% endif %}{% for m in rest %}"
        "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% if loop.first and system %}{% set content = '<<SYS>>\\n' ~ system ~ '\\n<</SYS>>\\n\\n' ~ m.content %}"
        "{% else %}{% set content = m['content'] %}{% endif %}{% if m['role'] == 'user' %}"
        "{{ bos_token + '[INST] ' + content | trim + ' [/INST]' }}{% else %}{{ ' ' + content | trim + ' ' + eos_token }}"
        "{% endif %}{% if loop.last %}!{% endif %}{{ loop.length }}{{ loop.revindex }}{{ loop.previtem is defined }}{% endfor %}"
    ),
    "blocks": (
        "    {% for m in messages %}\n        {% if m.content %}\n{{ m.content }}\n        {% endif %}\n    {% endfor %}\n"
        "  end\n"
    ),
    "namespace": (
        "{% set ns = namespace(n=0, names=[]) %}{% for m in messages %}{% if m.role == 'assistant' %}{% continue %}{% endif %}"
        "{% set ns.n = ns.n + 1 %}{% if ns.n > 5 %}{% break %}{% endif %}{{ ns.n }}:{{ m.role|upper }};{% endfor %}"
        "{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice('a') }}{{ dict(a=1)|tojson }}{{ [3,1,2]|sort|join(',') }}"
        "{% for i in range(3) %}{{ i }}{% else %}none{% endfor %}{% for x in [] %}{% else %}none{% endfor %}{{ 'a' * 3 }}{{ 2 ** 3 }}"
    ),
    "tools": (
        "{% if tools %}{% for tool in tools %}{{ tool | tojson(indent=2) }}{{ tool | tojson }}{% endfor %}{% endif %}"
        "{% for m in messages %}{% if m.tool_calls is defined %}{% for c in m.tool_calls %}{{ c.function.arguments|tojson }}"
        "{% endfor %}{% else %}{{ m.content }}{% endif %}{{ 'content' in m }}{% endfor %}{{ documents is none }}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "joining": "{{ 1 ~ none ~ 'a' ~ (2 ~ [3, 'b' ~ 4]) }}{% set x = 'c' ~ 5 %}{{ x ~ x if 'd' ~ x else 'e' ~ x }}{{ 1 + 2 }}",
    "variables": "{{ enable_thinking | default(true) }}{{ x.y.z if x is defined }}{{ messages | length }}{{ unk_token is defined }}",
    "recursive": "{% for i in [[1, [2]], 3] recursive %}{% if i is iterable %}({{ loop(i) }}){% else %}{{ i }}{% endif %}{% endfor %}",
    "date": "{{ strftime_now('%d %b %Y') }}",
}
CHATS: Mapping[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "long": [SYSTEM, USER, ANSWER, USER],
    "calls": [USER, CALL],
    "extra": [USER | {"name": "x", "none": None}],
}
SPECIAL = {"bos_token": "<|start|>", "eos_token": "<|stop|>"}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tiny.write_folder(tmp_path_factory.mktemp("chat") / "model")
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **SPECIAL)


@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_text_is_that_of_transformers(
    reference: PreTrainedTokenizerFast, template: str, chat: str, add_generation_prompt: bool
) -> None:
    text, messages = TEMPLATES[template], CHATS[chat]
    variables: dict[str, Any] = {"tools": [TOOL]} if template == "tools" else {"enable_thinking": False}
    options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, **variables}
    try:
        expected = reference.apply_chat_template(messages, chat_template=text, tokenize=False, **options)
    except Exception as error:  # noqa: BLE001  (any of the template's own)
        with pytest.raises(InvalidInput, match="the chat template failed on these messages") as raised:
            ChatTemplates({"default": text}, SPECIAL, "x").render(messages, variables=variables)
        assert str(error) in str(raised.value)
        return
    ours = ChatTemplates({"default": text}, SPECIAL, "x")
    assert ours.render(messages, add_generation_prompt=add_generation_prompt, variables=variables) == expected


def test_most_of_the_comparisons_are_of_texts(reference: PreTrainedTokenizerFast) -> None:
    rendered = 0
    for text in TEMPLATES.values():
        for messages in CHATS.values():
            try:
                ChatTemplates({"default": text}, SPECIAL, "x").render(messages)
                rendered += 1
            except InvalidInput:
                pass
    assert rendered >= 40


def write(folder: Path, config: Mapping[str, Any] | None, template: str | None = None) -> Tokenizer:
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.from_folder(folder, ModelConfig.from_folder(folder))


def test_ids_are_those_of_the_text_with_nothing_added(tiny_folder: Path, reference: PreTrainedTokenizerFast) -> None:
    tokenizer = write(tiny_folder, {"chat_template": TEMPLATES["chatml"], **SPECIAL})
    options: dict[str, Any] = {"add_generation_prompt": True, "tokenize": True}
    given: Any = reference.apply_chat_template([USER], chat_template=TEMPLATES["chatml"], return_dict=False, **options)
    theirs: list[int] = given
    assert tokenizer.apply_chat_template([USER], **options) == theirs
    assert tokenizer.decode(theirs) == tokenizer.apply_chat_template([USER], add_generation_prompt=True)


def test_templates_are_found_wherever_they_are_written(tiny_folder: Path) -> None:
    chat = [USER]
    assert write(tiny_folder, {"chat_template": "one"}).apply_chat_template(chat) == "one"
    named = {"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]}
    tokenizer = write(tiny_folder, named)
    assert tokenizer.apply_chat_template(chat) == "a"
    assert tokenizer.apply_chat_template(chat, tools=[TOOL]) == "b"
    assert tokenizer.apply_chat_template(chat, chat_template="tool_use") == "b"
    # A file of its own goes before the configuration, which keeps the special tokens.
    tokenizer = write(tiny_folder, named | {"bos_token": {"content": "<|start|>", "lstrip": False}}, "{{ bos_token }}!")
    assert tokenizer.apply_chat_template(chat) == "<|start|>!"
    assert tokenizer.apply_chat_template(chat, chat_template="tool_use") == "b"


def test_a_model_without_a_template_says_so(tiny_folder: Path) -> None:
    with pytest.raises(
        InvalidInput, match=r"tokenizer_config.json: the model has no chat template; give the prompt as text"
    ):
        write(tiny_folder, None).apply_chat_template([USER])
    named = {"chat_template": [{"name": "rag", "template": "a"}]}
    with pytest.raises(InvalidInput, match=r"no chat template 'default'; it has rag"):
        write(tiny_folder, named).apply_chat_template([USER])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"chat_template": 7}, "chat_template is 7; expected a template, or a list"),
        ({"chat_template": [{"name": "default"}]}, r"chat_template is \[\{'name': 'default'\}\]; expected a template"),
        ({"chat_template": ["a"]}, "expected a template, or a list of objects with a name and a template"),
        ({"bos_token": 5}, "bos_token is 5; expected a string"),
        ({"bos_token": {"lstrip": True}}, "bos_token: content is missing; expected a string"),
    ],
)
def test_a_damaged_configuration_is_refused(tiny_folder: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidModel, match=rf"tokenizer_config.json: .*{message}"):
        write(tiny_folder, config)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a" * (2**20 + 1)])
def test_a_template_file_that_is_none_is_refused(tiny_folder: Path, content: bytes) -> None:
    (tiny_folder / "chat_template.jinja").write_bytes(content)
    with pytest.raises(
        InvalidModel, match=r"chat_template.jinja: (cannot be read as UTF-8|expected a chat template of at most)"
    ):
        write(tiny_folder, None)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], r"chat messages are \[\]; expected a list of at least one message"),
        ("hello", "chat messages are 'hello'; expected a list"),
        ({"role": "user"}, "expected a list of at least one message"),
        (None, "chat messages are None"),
        (["hello"], "chat message 1 is 'hello'; expected a mapping with a role"),
        ([USER, {"content": "x"}], "chat message 2 is {'content': 'x'}; expected a mapping with a role"),
        ([{"role": 1, "content": "x"}], "expected a mapping with a role"),
        ([{"role": "user", "content": 7}], "chat message 1 has the content 7; expected text or a list of mappings"),
        ([{"role": "user", "content": ["x"]}], r"has the content \['x'\]"),
        ([{"role": "user", "content": "x", "extra": object()}], "chat data 'extra' holds <object object"),
    ],
)
def test_messages_of_another_shape_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as raised:
        ChatTemplates({"default": "x"}, {}, "x").render(messages)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "the chat template does not parse, line 1: Expected an expression"),
        ("{% generation %}", "does not parse"),
        ("{{ raise_exception('only\nusers') }}", "failed on these messages: only users"),
        ("{{ messages[0].content.x.y }}", "failed on these messages: 'str object' has no attribute 'x'"),
        ("{{ 1 / 0 }}", "failed on these messages: division by zero"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{{ lipsum(100) }}", "'lipsum' is undefined"),
        ("{% include 'x' %}", "no loader"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "failed on these messages"),
    ],
)
def test_a_template_that_fails_is_one_clear_line(template: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as raised:
        ChatTemplates({"default": template}, {}, "x").render([USER])
    assert "\n" not in str(raised.value)


ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops over text": "{% set s = 'x' * 999 %}" + "{% for a in s %}" * 9 + "{% endfor %}" * 9,
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive loop": "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "much text": "{% for a in range(99999) %}{{ 'x' * 999 }}{% endfor %}",
    "long repetition": "{{ 'x' * 10 ** 9 }}",
    "list repetition": "{{ ([0] * 10 ** 9) | length }}",
    "doubling by +": "{% set n = namespace(x='x') %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling by ~": "{% set n = namespace(x='x') %}{% for a in range(99) %}{% set n.x = ((n.x ~ (n.x ~ '')) ~ '')|trim %}{% endfor %}",
    "doubling lists": "{% set n = namespace(x=[1]) %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling by a macro": (
        "{% macro d(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(x='x') %}"
        "{% for a in range(99) %}{% set n.x = d(n.x) %}{% endfor %}"
    ),
    "doubling by a block": (
        "{% set n = namespace(x='x') %}{% for a in range(99) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}"
    ),
    "large power": "{{ 10 ** 10 ** 9 }}",
}


@pytest.mark.parametrize("template", ENDLESS)
def test_a_template_that_would_not_end_is_stopped(template: str) -> None:
    start = time.monotonic()
    limit = r"takes more than|writes more than|a text or list of|a power that is too large|recursion depth"
    with pytest.raises(InvalidInput, match=f"the chat template failed on these messages: .*({limit})"):
        ChatTemplates({"default": ENDLESS[template]}, {}, "x").render([USER])
    assert time.monotonic() - start < 20


def test_the_date_is_todays() -> None:
    today = dt.datetime.now().astimezone()
    text = ChatTemplates({"default": "{{ strftime_now('%Y') }}"}, {}, "x").render([USER])
    assert int(text) - today.year in {0, 1}
