from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from mega_common.parent_death import kill_with_parent, terminate_with_parent

PARENT = """
import subprocess, sys
from mega_common.parent_death import {function}
child = subprocess.Popen([sys.executable, "-c", {child!r}], preexec_fn={function})
child.wait()
"""
CHILD = """
import signal
signal.signal(signal.SIGTERM, lambda *_: (print("SIGTERM", flush=True), exit()))
print("ready", flush=True)
signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
@pytest.mark.parametrize(("function", "last_output"), [(terminate_with_parent, "SIGTERM\n"), (kill_with_parent, "")])
def test_a_child_ends_when_its_parent_is_killed(function: object, last_output: str) -> None:
    command = [sys.executable, "-c", PARENT.format(function=function.__name__, child=CHILD)]  # type: ignore[attr-defined]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        parent.send_signal(signal.SIGKILL)
        assert parent.stdout.read() == last_output  # read to the end of the pipe, which the child holds open
