"""Exit codes and reports of scripts, and the check for an accelerator."""

import os
import re
import sys

import jax
import jax.numpy as jnp
import pytest

from podracers import errors, leaks
from podracers.commands import command_line
from tests import processes

_KEPT = jax.errors.UnexpectedTracerError("created on line /mine.py:3:20 (table).")


@pytest.mark.parametrize(
    ("error", "code", "report"),
    [
        (errors.UserError("no\nmore"), 2, "error: no"),
        (errors.RunFailure("full"), 1, "failed: full"),
        (_KEPT, 2, f"error: {leaks.explained(_KEPT)}"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError("all of it"), 1, "failed: out of memory: MemoryError: all of it"),
    ],
)
def test_known_causes_get_one_line(error, code, report):
    end = command_line.ending(error)
    assert (end.code, end.report) == (code, report)


def test_values_follow_one_flag_or_repeat_it():
    parser = command_line.Parser()
    parser.add_experiment()
    words = ["--gin_file", "a", "b", "--gin_bindings", "A = 1", "B = 2", "--gin_bindings", "C = 3"]
    options = parser.parse_args(words)
    assert (options.gin_file, options.gin_bindings) == (["a", "b"], ["A = 1", "B = 2", "C = 3"])
    assert parser.parse_args([]).gin_bindings == []
    folders = (processes.ROOT / "scripts", processes.ROOT / "podracers" / "commands")
    source = "".join(file.read_text() for folder in folders for file in folder.glob("*.py"))
    assert re.findall(r'"append"|nargs="\+"', source) == []


def test_a_standard_stream_that_is_closed_is_no_file_of_the_script(tmp_path):
    program = """
import os, subprocess, sys
from podracers.commands import command_line

def main():
    with open("file", "w") as file:
        print("to nobody", sys.stdin.read())
        print("to nobody", file=sys.stderr, flush=True)
        child = subprocess.run(["sh", "-c", "echo to nobody; echo to nobody >&2; cat"])
        print(child.returncode, file=file)

command_line.run(main)
"""
    for redirections in ("< /dev/null >&-", "<&- 2>&-"):
        shell = ("sh", "-c", f'exec "$0" -c "$1" {redirections}', sys.executable, program)
        started = processes.spawn(shell, cwd=tmp_path, environment={"PYTHONPATH": processes.ROOT})
        ended = processes.finish(started)
        assert ended.stdout.count("nobody") == 2 * (" >&-" not in redirections)
        assert ended.stderr.count("nobody") == 2 * ("2>&-" not in redirections)
        assert (tmp_path / "file").read_text() == "0\n"


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, None),
        ({"XDG_CACHE_HOME": "/a"}, "/a/podracers/jax"),
        ({"HOME": "/b"}, "/b/.cache/podracers/jax"),
        ({"JAX_COMPILATION_CACHE_DIR": "/c"}, "/c"),
    ],
)
def test_a_user_without_a_home_has_a_cache_where_a_variable_names_it(
    variables, folder, monkeypatch, capsys
):
    for name in ("HOME", "XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    # A user of a container, without an entry in /etc/passwd.
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    before = jax.config.values["jax_compilation_cache_dir"]
    try:
        # As JAX does when it is imported.
        jax.config.update("jax_compilation_cache_dir", variables.get("JAX_COMPILATION_CACHE_DIR"))
        command_line.use_compilation_cache()
        assert jax.config.values["jax_compilation_cache_dir"] == folder
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert capsys.readouterr().err.count("\n") == (folder is None)


def test_memory_that_a_device_lacks_gets_one_line():
    with pytest.raises(Exception, match="100000000000000 bytes") as raised:
        jax.block_until_ready(jnp.zeros(10**14, jnp.uint8))
    end = command_line.ending(raised.value)
    assert end.code == 1
    assert end.report.startswith("failed: out of memory: ") and "\n" not in end.report


def test_the_cpu_is_refused_where_the_machine_shows_an_accelerator(tmp_path):
    before = jax.config.jax_platforms
    assert jax.default_backend() == "cpu"
    jax.config.update("jax_platforms", None)
    try:
        command_line.require_accelerator(tmp_path)
        (tmp_path / "accel0").touch()
        with pytest.raises(errors.UserError, match=r"accel0.*JAX_PLATFORMS=cpu"):
            command_line.require_accelerator(tmp_path)
        jax.config.update("jax_platforms", "cpu")
        command_line.require_accelerator(tmp_path)
    finally:
        jax.config.update("jax_platforms", before)
