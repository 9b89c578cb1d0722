"""Tests of errors that prove damage, and of those that do not."""

import errno

import jax
import pytest

from podracers import errors
from podracers.training import manifest


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), errors.RunFailure),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), errors.RunFailure),
        (PermissionError(errno.EACCES, "Permission denied"), errors.RunFailure),
        (OSError(errno.EIO, "Input/output error"), manifest.DamagedError),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), manifest.DamagedError),
        (ValueError("Expecting value"), manifest.DamagedError),
    ],
)
def test_a_file_that_cannot_be_read_now_is_not_damaged(error, kind):
    with pytest.raises(kind, match="a/b: "), manifest.reading("a/b"):
        raise error


def test_a_manifest_without_the_files_of_an_item_is_damage(tmp_path):
    (tmp_path / manifest.MANIFEST).write_text("{}")
    with pytest.raises(manifest.DamagedError, match="no files of state"):
        manifest.verify(tmp_path, ["state"])
