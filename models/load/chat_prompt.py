"""Chat messages to token ids, so that text inside a message never becomes a control token.

Control tokens are the tokenizer's special tokens and those added tokens that are spelled as markup (<think>, [INST]).
The template is rendered by transformers, as everywhere else; then the text is encoded in one piece, so the ids are
those of `apply_chat_template`. Only where a string of the request contains the text of a control token (or has a piece
of one at its edge, which could combine with its neighbour) is more done:

1. Markers of private-use characters, new for each process, are put into that text before rendering and break it up.
   What still reads as a control token after rendering was written by the template.
2. Each of those is replaced by a stand-in, the markers are taken out, and the text is encoded by a copy of the
   tokenizer that knows its control tokens by their stand-ins only. So the request's text is encoded as ordinary text,
   in one piece with its surroundings.
3. The marked rendering without its markers must equal the plain rendering. Where it does not, the template inspects
   marked text (Qwen3's looks for </think> in answers). The fewest marks that disturb it are dropped, and the template
   decides what that text means; a special token that a template inspects in a message is refused.

Roles are not marked, since templates compare them; they must be well known or be named in the template.

The text of step 2 is called sealed: which control tokens are meant can be read off it, so it can be compared with what
ids stand for, cut, and encoded in parts.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import re
import secrets
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

from sparsejax.errors import RequestError
from sparsejax.models.load.chat_request import check_data, joined, map_request

_KNOWN_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_TEMPLATE_VARIABLES = frozenset({"tools", "documents", "continue_final_message", "reasoning_effort"})
_MARKUP = re.compile(r"[<\[\uff5c].+[>\]\uff5c]", re.DOTALL)
_MAX_RENDERINGS = 64
_NONCE = secrets.token_hex(8)
_MARK = f"\ue000{_NONCE}\ue001"
_PLACE = f"\ue000{secrets.token_hex(8)}\ue001"
_PLACE_OF = f"\ue000{secrets.token_hex(8)}:{{}}\ue001"
_ANY_PLACE = re.compile(_PLACE_OF.format("([0-9]+)"))
_UNICODE_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})


class _Mark(NamedTuple):
    """One reason to break up one string of the request. `token` is None for a mark at an edge."""

    text: str
    token: str | None


class ChatPrompt:
    """Renders conversations with one tokenizer's template.

    Args:
      hf: a fast transformers tokenizer.
    """

    def __init__(self, hf: Any) -> None:
        self._hf = hf
        added = hf.backend_tokenizer.get_added_tokens_decoder().values()
        control = [token for token in added if token.content and (token.special or _MARKUP.fullmatch(token.content))]
        self.control_tokens = {token.content: token.special for token in control}
        # Longest first: the alternation then takes the longest token at a position, as the tokenizer does.
        ordered = sorted(self.control_tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self._stand_ins = {token: f"\ue000{_NONCE}:{index}\ue001" for index, token in enumerate(ordered)}
        self._tokens = {stand_in: token for token, stand_in in self._stand_ins.items()}
        self._stand_in_pattern = re.compile(f"\ue000{_NONCE}:[0-9]+\ue001")
        self._longest = len(ordered[0]) if ordered else 0
        self._beginnings = {token[:cut] for token in ordered for cut in range(1, len(token))}
        self._endings = {token[cut:] for token in ordered for cut in range(1, len(token))}
        self._all_tokens = "\n".join(ordered)

    def ids(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> list[int]:
        """Token ids of the conversation. Raises RequestError."""
        request = self._checked(messages, variables)
        plain = self._render(request, add_generation_prompt)
        if not self._marks(request):
            return self._hf.backend_tokenizer.encode(plain, add_special_tokens=False).ids
        return self._encode_separately(self._sealed(request, add_generation_prompt, plain))

    def sealed(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        after: int | None = None,
        before: int | None = None,
    ) -> tuple[str, int | None]:
        """The text that `ids` encodes, sealed, and where in it the content of message `after` ends or `before` begins.

        The place is None if none was asked for, or if the template does not write that content as it is. Raises
        RequestError.
        """
        request = self._checked(messages, variables)
        plain = self._render(request, add_generation_prompt)
        text = self._sealed(request, add_generation_prompt, plain)
        index = before if after is None else after
        if index is None:
            return self._normalized(text), None
        for content in _with_place(request["messages"][index]["content"], after is not None):
            changed = [*request["messages"]]
            changed[index] = {**changed[index], "content": content}
            placed = {**request, "messages": changed}
            try:
                rendered = self._render(placed, add_generation_prompt)
                if rendered.count(_PLACE) != 1 or rendered.replace(_PLACE, "") != plain:
                    continue
                head, _, tail = self._sealed(placed, add_generation_prompt, rendered).partition(_PLACE)
            except RequestError:  # the template minds the place
                continue
            if head + tail == text:
                head = self._normalized(head)
                return head + self._normalized(tail), len(head)
        return self._normalized(text), None

    def contents(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        indexes: Sequence[int],
    ) -> tuple[str, dict[int, tuple[int, int]]]:
        """The text of `sealed`, and where in it the contents of some messages begin and end.

        What `sealed` says of one place, for many in a few renderings. Messages are left out where that can't be said,
        or not together with others. Raises RequestError.
        """
        request = self._checked(messages, variables)
        plain = self._render(request, add_generation_prompt)
        text = self._sealed(request, add_generation_prompt, plain)
        found: dict[int, tuple[int, int]] = {}
        groups, tries = [list(indexes)] if indexes else [], 0
        while groups and tries < _MAX_RENDERINGS:
            group = groups.pop()
            for trimmed in (False, True):
                tries += 1
                places = self._places(request, add_generation_prompt, plain, text, group, trimmed)
                if places is not None:
                    found |= places
                    break
            else:
                if len(group) > 1:
                    middle = len(group) // 2
                    groups += [group[middle:], group[:middle]]
        return self._normalized(text), found

    def _places(
        self,
        request: Mapping[str, Any],
        add_generation_prompt: bool,
        plain: str,
        text: str,
        indexes: Sequence[int],
        trimmed: bool,
    ) -> dict[int, tuple[int, int]] | None:
        """Where contents lie in the text, white space around them left out if `trimmed`; None if one can't be found."""
        changed = [*request["messages"]]
        for index in indexes:
            content = changed[index]["content"]
            core = content.strip() if trimmed else content
            lead = content[: len(content) - len(content.lstrip())] if trimmed and core else ""
            tail = content[len(lead) + len(core) :]
            placed = lead + _PLACE_OF.format(2 * index) + core + _PLACE_OF.format(2 * index + 1) + tail
            changed[index] = {**changed[index], "content": placed}
        try:
            placed_request = {**request, "messages": changed}
            rendered = self._render(placed_request, add_generation_prompt)
            if _ANY_PLACE.sub("", rendered) != plain:
                return None
            pieces = _ANY_PLACE.split(self._sealed(placed_request, add_generation_prompt, rendered))
        except RequestError:  # the template minds the places
            return None
        # Pieces of text and numbers of places in turn.
        texts, numbers = pieces[::2], [int(number) for number in pieces[1::2]]
        if "".join(texts) != text or sorted(numbers) != sorted(2 * i + end for i in indexes for end in (0, 1)):
            return None
        shown = [self._normalized(part) for part in texts]
        if "".join(shown) != self._normalized(text):
            return None
        ends = dict(zip(numbers, itertools.accumulate(map(len, shown)), strict=False))
        return {index: (ends[2 * index], ends[2 * index + 1]) for index in indexes}

    def seal(self, text: str) -> str:
        """A raw prompt, sealed: control tokens written in it count as such."""
        return self._normalized(self._pattern.sub(lambda match: self._stand_ins[match.group()], text))

    def encode(self, sealed: str) -> list[int]:
        """Token ids of a sealed text."""
        plain = self._stand_in_pattern.sub(lambda match: self._tokens[match.group()], sealed)
        if self._pattern.sub(lambda match: self._stand_ins[match.group()], plain) == sealed:
            return self._hf.backend_tokenizer.encode(plain, add_special_tokens=False).ids
        return self._encode_separately(sealed)

    def stand_in(self, token: str) -> str:
        """How an added token is written in sealed text."""
        return self._stand_ins.get(token, token)

    def text(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        """The plain rendering. Raises RequestError."""
        return self._render(self._checked(messages, variables), add_generation_prompt)

    def _normalized(self, text: str) -> str:
        normalizer = self._hf.backend_tokenizer.normalizer
        # Any other normalizer may do what is not to be done twice.
        return normalizer.normalize_str(text) if type(normalizer).__name__ in _UNICODE_FORMS else text

    def _encode_separately(self, sealed: str) -> list[int]:
        separate, real_ids = self._separate_tokenizer
        ids: list[int] = separate.encode(sealed, add_special_tokens=False).ids
        return [real_ids.get(index, index) for index in ids]

    def _sealed(self, request: Mapping[str, Any], add_generation_prompt: bool, plain: str) -> str:
        marks = self._marks(request)
        marked = self._render_marked(request, marks, add_generation_prompt, plain) if marks else plain
        return self._pattern.sub(lambda match: self._stand_ins[match.group()], marked).replace(_MARK, "")

    @functools.cached_property
    def _separate_tokenizer(self) -> tuple[Any, dict[int, int]]:
        """A copy of the tokenizer that knows control tokens by stand-ins only, and its added ids to the real ids."""
        import tokenizers

        data = json.loads(self._hf.backend_tokenizer.to_str())
        for token in data["added_tokens"]:
            token["content"] = self._stand_ins.get(token["content"], token["content"])
        data["post_processor"] = None
        separate: Any = tokenizers.Tokenizer.from_str(json.dumps(data))
        # Tokens that the vocabulary itself lacks are numbered anew in the copy, so every added token is mapped.
        return separate, {separate.token_to_id(token["content"]): token["id"] for token in data["added_tokens"]}

    # Rendering

    def _render(self, request: Mapping[str, Any], add_generation_prompt: bool) -> str:
        variables = dict(request)
        messages = variables.pop("messages")
        try:
            return self._hf.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **variables
            )
        except Exception as error:  # The template is the checkpoint's code: whatever it raises refuses this request.
            reason = str(error).replace(_MARK, "") or type(error).__name__
            raise RequestError(f"the chat template refuses these messages: {reason}", param="messages") from None

    def _render_marked(
        self, request: Mapping[str, Any], marks: list[_Mark], add_generation_prompt: bool, plain: str
    ) -> str:
        """The rendering with all marks but those that change it."""
        kept: list[_Mark] = []
        marked, renderings = plain, 0
        groups = [marks]
        while groups:
            group = groups.pop()
            renderings += 1
            if renderings > _MAX_RENDERINGS:
                raise RequestError(
                    "too many strings with control tokens that the chat template inspects", param="messages"
                )
            attempt = self._try_marks(request, [*kept, *group], add_generation_prompt)
            if attempt is not None and attempt.replace(_MARK, "") == plain:
                kept, marked = [*kept, *group], attempt
            elif len(group) > 1:
                middle = len(group) // 2
                groups += [group[middle:], group[:middle]]
            elif self.control_tokens.get(group[0].token or ""):
                raise RequestError(
                    f"a message contains {group[0].token!r}, a control token that the chat template inspects",
                    param="messages",
                )
        return marked

    def _try_marks(self, request: Mapping[str, Any], marks: list[_Mark], add_generation_prompt: bool) -> str | None:
        by_text: dict[str, set[str | None]] = {}
        for mark in marks:
            by_text.setdefault(mark.text, set()).add(mark.token)

        def change(text: str) -> str:
            return self._broken_up(text, by_text.get(text, frozenset()))

        marked = map_request(request, change, change)
        try:
            return self._render(marked, add_generation_prompt)
        except RequestError:
            return None

    def _marks(self, request: Mapping[str, Any]) -> list[_Mark]:
        """Every mark that the request's strings need, in order of appearance."""
        marks: dict[_Mark, None] = {}

        def visit_key(text: str) -> str:
            if _NONCE in text:
                raise RequestError("a message contains this server's private marker", param="messages")
            marks.update(dict.fromkeys(_Mark(text, token) for token in self._pattern.findall(text)))
            return text

        def visit(text: str) -> str:
            if self._has_piece_at_edge(text.strip()):
                marks[_Mark(text, None)] = None
            return visit_key(text)

        map_request(request, visit, visit_key)
        return list(marks)

    def _has_piece_at_edge(self, text: str) -> bool:
        """`text` could complete a control token with what stands beside it."""
        if not text:
            return False
        if len(text) < self._longest and text in self._all_tokens:
            return True
        lengths = range(1, min(len(text), self._longest) + 1)
        return any(text[-size:] in self._beginnings or text[:size] in self._endings for size in lengths)

    def _broken_up(self, text: str, tokens: Set[str | None]) -> str:
        # A mark after each character of a token also breaks a second token that overlaps it. Marks at the edges stand
        # inside the white space that templates trim.
        broken = self._pattern.sub(
            lambda match: "".join(char + _MARK for char in match.group()) if match.group() in tokens else match.group(),
            text,
        )
        core = broken.strip()
        return broken.replace(core, f"{_MARK}{core}{_MARK}", 1) if None in tokens else broken

    # Checks

    def _checked(self, messages: Any, variables: Mapping[str, Any]) -> dict[str, Any]:
        """The template's variables with messages as plain dicts, content parts joined. Raises RequestError."""
        if not self._hf.chat_template:
            raise RequestError(
                "this model has no chat template: use completions, or set --chat-template", param="messages"
            )
        if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
            raise RequestError("messages must be a list of at least one message", param="messages")
        for name, value in variables.items():
            if name in self._reserved_names:
                raise RequestError(f"chat template variable {name!r} can't be set", param="chat_template_kwargs")
            check_data(value, name, "chat_template_kwargs")
        return {"messages": [self._checked_message(*item) for item in enumerate(messages)], **variables}

    @functools.cached_property
    def _reserved_names(self) -> frozenset[str]:
        parameters = inspect.signature(self._hf.apply_chat_template).parameters
        return (frozenset(parameters) | {"messages", "self"}) - _TEMPLATE_VARIABLES

    def _checked_message(self, index: int, message: Any) -> dict[str, Any]:
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"{where} must be an object, got {type(message).__name__}", param="messages")
        role = message.get("role")
        if role is None:
            raise RequestError(f"{where} has no role", param="messages")
        if not isinstance(role, str) or not (role in _KNOWN_ROLES or self._template_names(role)):
            known = ", ".join(sorted(_KNOWN_ROLES))
            raise RequestError(f"{where}.role={role!r} is unknown: use one of {known}", param="messages")
        content = message.get("content")
        if content is None:
            if not message.get("tool_calls"):
                raise RequestError(f"{where} has no content", param="messages")
            content = ""
        checked = {**message, "content": joined(content, f"{where}.content")}
        check_data(checked, where, "messages")
        return checked

    def _template_names(self, role: str) -> bool:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,63}", role):
            return False
        template = self._hf.chat_template
        texts = template.values() if isinstance(template, Mapping) else [template]
        return any(f"'{role}'" in text or f'"{role}"' in text for text in texts)


def _with_place(content: str, end: bool) -> list[str]:
    """The content with a place at its end or beginning, or inside the white space there, which templates may trim."""
    if end:
        core = content.rstrip()
        return list(dict.fromkeys([content + _PLACE, core + _PLACE + content[len(core) :]]))
    core = content.lstrip()
    return list(dict.fromkeys([_PLACE + content, content[: len(content) - len(core)] + _PLACE + core]))
