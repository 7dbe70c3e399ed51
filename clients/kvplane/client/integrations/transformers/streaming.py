"""Text of a completion as its tokens come, cut at stop strings."""

from typing import Any

from tokenizers.decoders import DecodeStream

from kvplane.wire.errors import UnsupportedFeatureError


class TextStream:
    """Decodes token by token. Text that may still become a stop string is held back until that is decided."""

    def __init__(self, tokenizer: Any, stop_strings: tuple[str, ...] = ()) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UnsupportedFeatureError(f"{type(tokenizer).__name__} has no fast tokenizer to stream text with")
        self._tokenizer = tokenizer
        self._backend = backend
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._stop_strings = stop_strings
        self._longest_stop = max((len(each) for each in stop_strings), default=0)
        self._tokens: list[int] = []
        self._text = ""
        self._told = 0
        self._incomplete = False
        self.stopped = False
        """Whether a stop string appeared."""

    @property
    def text(self) -> str:
        """All text so far, what is held back included."""
        return self._text

    def push(self, token: int) -> str:
        """Take a token; returns the text that can be told now."""
        self._tokens.append(token)
        piece = self._decoder.step(self._backend, token)
        self._incomplete = piece is None
        if not piece:
            return ""
        self._add(piece)
        return self._tell(len(self._text) if self.stopped else len(self._text) - self._held_back())

    def close(self) -> str:
        """The text that is left: what was held back, and characters that stay incomplete."""
        if self._incomplete and not self.stopped:
            whole = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
            if whole.startswith(self._text):
                self._add(whole[len(self._text) :])
        return self._tell(len(self._text))

    def _add(self, piece: str) -> None:
        start = max(0, len(self._text) - self._longest_stop + 1)
        self._text += piece
        found = [place for each in self._stop_strings if (place := self._text.find(each, start)) >= 0]
        if found:
            self._text = self._text[: min(found)]
            self.stopped = True

    def _held_back(self) -> int:
        for length in range(min(self._longest_stop - 1, len(self._text)), 0, -1):
            tail = self._text[-length:]
            if any(each.startswith(tail) for each in self._stop_strings):
                return length
        return 0

    def _tell(self, end: int) -> str:
        new = self._text[self._told : end]
        self._told = max(self._told, end)
        return new
