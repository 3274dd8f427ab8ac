"""The memory in which processes of one machine meet, and what goes there. test_hierarchy.py lets such processes go."""

import os
from pathlib import Path

import mxnet as mx
import pytest

from gluon_syncbn import _native


def test_another_file_is_not_taken_for_the_memory(tmp_path):
    """Which has no name: it goes with the last process."""
    token, other = "0123456789abcdef" * 2, tmp_path / "other"
    segment = _native.segment(2, 0, token, "")
    memory = Path(f"/proc/{os.getpid()}/fd/{_native.segment_number(segment)}")
    assert memory.readlink().name.startswith("memfd:")
    assert memory.stat().st_mode & 0o777 == 0o600 and memory.stat().st_nlink == 0
    with pytest.raises(mx.MXNetError, match="is of another process"):
        _native.segment(2, 1, "00" * 16, str(memory))
    with pytest.raises(mx.MXNetError, match=f"{other}: No such file"):
        _native.segment(2, 1, token, str(other))
    other.touch()
    with pytest.raises(mx.MXNetError, match="is another file"):
        _native.segment(2, 1, token, str(other))
    _native.segment_free(segment)
