"""Chat templates: a conversation as the text a chat model was trained on, rendered as transformers renders it.

A template is a program of whoever published the model. It runs in jinja's sandbox, sees plain data only, and takes a bounded
number of steps; operators, loops, macros and output make no text beyond a limit, though string methods and filters may.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from forebay.specs.errors import InvalidInput, InvalidModel

from .json_fields import Fields, read_json_object, show

TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
TEMPLATE_FILE: Final = "chat_template.jinja"
DEFAULT: Final = "default"

Message = Mapping[str, Any]

_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MAX_TEMPLATE_BYTES: Final = 2**20
_MAX_TEXT: Final = 2**24
_MAX_EXPONENT: Final = 64
_MAX_STEPS: Final = 10**6
"""Loop turns and calls of one rendering; a conversation of 1,000 messages takes some ten thousand."""


class ChatTemplates:
    """The chat templates of one model, by name."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str], source: str) -> None:
        """``special_tokens``: what the templates see as ``bos_token`` and so on. ``source``: what errors name.

        Raises :class:`InvalidModel` where the templates are longer than any template.
        """
        if sum(map(len, templates.values())) > _MAX_TEMPLATE_BYTES:
            raise InvalidModel(f"{source}: expected chat templates of at most {_MAX_TEMPLATE_BYTES} characters")
        self.templates = MappingProxyType(dict(templates))
        self.special_tokens = MappingProxyType(dict(special_tokens))
        self.source = source

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplates:
        """Read ``tokenizer_config.json`` and ``chat_template.jinja`` of ``folder``; both may be absent.

        Raises :class:`InvalidModel` where one is damaged.
        """
        config, own = folder / TOKENIZER_CONFIG_FILE, folder / TEMPLATE_FILE
        fields = Fields(str(config), read_json_object(config) if config.exists() else {})
        found = cls.from_fields(fields)
        if not own.exists():
            return found
        try:
            if own.stat().st_size > _MAX_TEMPLATE_BYTES:
                raise InvalidModel(f"{own}: expected a chat template of at most {_MAX_TEMPLATE_BYTES} bytes")
            template = own.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidModel(
                f"{own}: cannot be read as UTF-8 text ({error}); copy or fetch the folder again"
            ) from error
        return cls({**found.templates, DEFAULT: template}, found.special_tokens, str(own))

    @classmethod
    def from_fields(cls, fields: Fields) -> ChatTemplates:
        """The templates and special tokens of a parsed ``tokenizer_config.json``; raises :class:`InvalidModel`."""
        special = {name: _token_text(fields, name) for name in _SPECIAL_TOKENS if fields.has(name)}
        given = fields.raw("chat_template")
        if given is None or given == "":
            return cls({}, special, fields.source)
        if isinstance(given, str):
            return cls({DEFAULT: given}, special, fields.source)
        whole = isinstance(given, list) and all(
            isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
            for entry in given
        )
        if not whole:
            raise fields.invalid("chat_template", "a template, or a list of objects with a name and a template")
        return cls({entry["name"]: entry["template"] for entry in given}, special, fields.source)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        name: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: at least one; each has a ``role``, and mostly a ``content`` of text or a list of objects.
            add_generation_prompt: end with what opens the assistant's turn.
            name: which template; None takes ``default``, or ``tool_use`` where ``variables`` has ``tools``.
            variables: further names the template sees (``tools``, ``documents``, ``enable_thinking``, …).

        Raises:
            InvalidInput: there is no such template, the messages are of another shape, or the template fails on them.
        """
        plain = _plain_messages(messages)
        extra = {key: _plain(value, key) for key, value in (variables or {}).items()}
        text = self._select(name, with_tools=extra.get("tools") is not None)
        known = {"tools": None, "documents": None, **self.special_tokens}
        try:
            return _render(text, {**known, **extra, "messages": plain, "add_generation_prompt": add_generation_prompt})
        except jinja2.TemplateSyntaxError as error:
            raise InvalidInput(
                f"{self.source}: the chat template does not parse, line {error.lineno}: {error.message}"
            ) from error
        # Templates call methods of strings, lists and dictionaries with whatever the messages hold: any of them may fail.
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InvalidInput(f"{self.source}: the chat template failed on these messages: {reason}") from error

    def _select(self, name: str | None, *, with_tools: bool) -> str:
        if not self.templates:
            raise InvalidInput(f"{self.source}: the model has no chat template; give the prompt as text")
        preferred = ("tool_use", DEFAULT) if with_tools else (DEFAULT,)
        for candidate in preferred if name is None else (name,):
            if candidate in self.templates:
                return self.templates[candidate]
        raise InvalidInput(
            f"{self.source}: no chat template {show(name or DEFAULT)}; it has {', '.join(sorted(self.templates))}"
        )


def _token_text(fields: Fields, name: str) -> str:
    """A special token, which is a string or an object that holds one."""
    if isinstance(fields.raw(name), dict):
        return fields.section(name).text("content")
    return fields.text(name)


def _plain_messages(messages: Sequence[Message]) -> list[Any]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise InvalidInput(f"chat messages are {show(messages)}; expected a list of at least one message")
    plain = []
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidInput(
                f"chat message {number} is {show(message)}; expected a mapping with a role such as 'user' and a content"
            )
        content = message.get("content")
        listed = isinstance(content, (list, tuple)) and all(isinstance(part, Mapping) for part in content)
        if not (content is None or isinstance(content, str) or listed):
            raise InvalidInput(
                f"chat message {number} has the content {show(content)}; expected text or a list of mappings"
            )
        # A key without a value is an absent one: templates ask whether it is there.
        plain.append({key: _plain(value, key) for key, value in message.items() if value is not None})
    return plain


def _plain(value: object, where: object) -> Any:
    """``value`` rebuilt of JSON's types alone, so that a template reaches no method of anything else."""
    if value is None or type(value) in {str, int, float, bool}:
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, key) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where) for item in value]
    raise InvalidInput(f"chat data {show(where)} holds {show(value)}; expected strings, numbers, lists and mappings")


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's text for training; its content is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012  (jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja's sandbox that counts the steps and the text of one rendering and refuses values it takes long to make."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        extensions: list[type[Extension]] = [_Generation, loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=self._written)
        self._steps = 0
        self._text = 0
        self.filters["tojson"] = _to_json
        self.filters |= {_COUNTED: self._counted, _JOINED: self._joined}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now, "dict": _make_dict}
        del self.globals["lipsum"]  # any amount of text in one call

    def bounded(self, tree: nodes.Template) -> nodes.Template:
        """``tree`` with every loop and every ``~`` counted."""
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = self._through(_COUNTED, loop.iter)
        # From the leaves up, so that what is inside a ``~`` has been dealt with when it is wrapped.
        for parent in reversed([tree, *tree.find_all(nodes.Node)]):
            for field, value in list(parent.iter_fields()):
                setattr(parent, field, self._without_concat(value))
        return tree

    def _without_concat(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._without_concat(item) for item in value)
        if isinstance(value, nodes.Concat):
            return self._through(_JOINED, nodes.List(value.nodes, lineno=value.lineno))
        return value

    def _through(self, name: str, value: nodes.Node) -> nodes.Node:
        return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno).set_environment(self)

    def step(self) -> None:
        """Count one loop turn or call."""
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise jinja2.TemplateError(f"it takes more than {_MAX_STEPS} steps")

    def _written(self, value: Any) -> Any:
        """Count the text of one ``{{ }}``, also inside macros, which keep theirs until they end."""
        if isinstance(value, str):
            self._text += len(value)
            if self._text > _MAX_TEXT:
                raise jinja2.TemplateError(f"it writes more than {_MAX_TEXT} characters")
        return value

    @jinja2.pass_context  # which also keeps jinja from evaluating it while it compiles
    def _counted(self, _context: Context, items: Any) -> Iterator[Any]:
        for item in items:
            self.step()
            yield item

    @jinja2.pass_context
    def _joined(self, _context: Context, items: list[Any]) -> str:
        texts = [str(item) for item in items]
        _refuse_long(sum(map(len, texts)))
        return "".join(texts)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.step()
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        lengths = [len(value) for value in (left, right) if isinstance(value, (str, list, tuple))]
        if operator == "+":
            _refuse_long(sum(lengths))
        elif operator == "*":
            times = next((value for value in (left, right) if isinstance(value, int)), 0)
            _refuse_long(sum(lengths) * times)
        elif abs(left) > _MAX_STEPS or abs(right) > _MAX_EXPONENT:
            raise jinja2.TemplateError("a power that is too large")
        return super().call_binop(context, operator, left, right)


def _refuse_long(length: int) -> None:
    if length > _MAX_TEXT:
        raise jinja2.TemplateError(f"a text or list of {length}; expected at most {_MAX_TEXT}")


_COUNTED: Final = "forebay_counted"
_JOINED: Final = "forebay_joined"


def _render(text: str, variables: Mapping[str, Any]) -> str:
    sandbox = _Sandbox()
    code = sandbox.compile(sandbox.bounded(sandbox.parse(text)))
    template = sandbox.template_class.from_code(sandbox, code, sandbox.make_globals(None))
    return template.render(variables)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers': jinja's own escapes characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """``dict`` without the type's own attributes."""
    return dict(*args, **kwargs)
