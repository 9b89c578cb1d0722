"""The provenance of results: commits and hashes of checkouts, installed copies, own modules."""

import hashlib
import importlib
import json
import subprocess
import sys

import pytest

from podracers.training import summary


def _git(root, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", *identity, "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(name="folder")
def _folder(tmp_path, monkeypatch):
    """Imports a module of the user's from a checkout, which it yields, and one from elsewhere."""
    root = tmp_path / "mine"
    (root / "docs").mkdir(parents=True)
    for file in ("docs/results.json", "README.md"):
        (root / file).write_text("[]")
    (root / "my_agent.py").write_text("")
    _git(root, "init", "--quiet")
    _git(root, "add", "-A")
    _git(root, "commit", "--quiet", "-m", "first")
    (tmp_path / "my_script.py").write_text("SEED = 3\n")
    for folder, name in ((root, "my_agent"), (tmp_path, "my_script")):
        monkeypatch.syspath_prepend(str(folder))
        importlib.import_module(name)
    yield root
    for name in ("my_agent", "my_script"):
        del sys.modules[name]


def test_provenance_has_the_commits_of_the_users_own_code(folder):
    head = _git(folder, "rev-parse", "HEAD")
    for file in ("docs/results.json", "README.md"):  # recorded results are no change
        (folder / file).write_text("[1]")
    facts = summary.provenance()
    assert facts["other_commits"] == {"my_agent": head}
    # Earlier tests may have imported others.
    modules = {k: x for k, x in facts["other_modules"].items() if folder.parent.as_posix() in k}
    assert modules == {
        str(file): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in (folder / "my_agent.py", folder.parent / "my_script.py")
    }
    assert (facts["device"], facts["platform"]) == ("4 x cpu", "cpu") and facts["cpu"]
    assert {"python", "jax", "flax", "optax", "podracers"} <= facts["versions"].keys()
    (folder / "my_agent.py").write_text("LENGTH = 4\n")
    assert summary.provenance()["other_commits"] == {"my_agent": f"{head}-dirty"}
    _git(folder, "update-ref", "-d", "HEAD")
    assert summary.provenance()["other_commits"] == {"my_agent": None}


@pytest.mark.parametrize(
    ("origin", "commit"),
    [
        ({"url": "https://a/b", "vcs_info": {"vcs": "git", "commit_id": "4be1c0"}}, "4be1c0"),
        ({"url": "file:///a/b.whl", "archive_info": {}}, None),
        (None, None),
    ],
)
def test_provenance_has_the_commit_that_pip_installed(tmp_path, monkeypatch, origin, commit):
    (tmp_path / "podracers").mkdir()
    record = tmp_path / "podracers-0.1.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Name: podracers\nVersion: 0.1\n")
    if origin:
        (record / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert summary.provenance()["commit"] != "4be1c0"  # of this checkout, not of that copy
    for root in (tmp_path, tmp_path / "elsewhere"):
        (root / "podracers").mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(summary, "_ROOT", root)
        expected = commit if root == tmp_path else None
        assert summary._installed_commit() == expected
