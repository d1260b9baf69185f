"""What a capture leaves as it found it, and how torch is asked to behave meanwhile."""

from __future__ import annotations

import contextlib
import logging
import random
import warnings
from collections.abc import Iterator

__all__ = ["as_exported", "untouched"]


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """Leave random state and grad mode as found; keep torch's warnings and logs about its own workings quiet.

    Kernels that only exist on this machine's processor (fused recurrent layers) are switched off, so that the trace
    holds the operators that they are made of.
    """
    import torch

    state = random.getstate()
    with (
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),
        _portable_kernels(),
        warnings.catch_warnings(),
        _quiet_logs(),
        contextlib.redirect_stderr(_Nowhere()),
    ):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            random.setstate(state)


@contextlib.contextmanager
def as_exported() -> Iterator[None]:
    """Let models see what torch.export shows them: many skip checks of values while they are exported."""
    from torch._export.utils import _compiling_state_context

    with _compiling_state_context():
        yield


@contextlib.contextmanager
def _portable_kernels() -> Iterator[None]:
    import torch

    is_enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(is_enabled)


class _Nowhere:
    """A stream for what torch prints of traces that failed; what a reader needs of them is in the error."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        return


@contextlib.contextmanager
def _quiet_logs() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith("torch")]
    handlers = [(handler, handler.level) for logger in loggers for handler in logger.handlers]
    for handler, _ in handlers:
        handler.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for handler, level in handlers:
            handler.setLevel(level)
