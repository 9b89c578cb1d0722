"""Evaluations in which each process plays its share of the episodes; process 0 has them all."""

import io
from collections.abc import Callable, Iterable

import numpy as np

from podracers import evaluation
from podracers.hosts import processes


def play_together(
    play: Callable[[tuple[int, int]], Iterable[evaluation.Episodes | None]],
) -> list[evaluation.Episodes] | None:
    """Plays a share in each process; all of them call it.

    Args:
      play: takes the share (see `evaluation.Evaluator.run`), and returns sets of its episodes; None
        among them is left out.

    Returns:
      The sets, whole, in process 0; None elsewhere, and where a signal stopped any process in it.
    """
    try:
        mine = [episodes for episodes in play(processes.share()) if episodes is not None]
    except evaluation.Stopped:
        mine = []
    parts = processes.gather(_packed(mine))
    sets = [_unpacked(part) for part in parts or [b""]]
    if not all(sets):
        return None
    return [evaluation.Episodes.join(each) for each in zip(*sets, strict=True)]


def _packed(sets: list[evaluation.Episodes]) -> bytes:
    """Returns sets of episodes as another process reads them; nothing of none."""
    if not sets:
        return b""
    file = io.BytesIO()
    np.savez_compressed(file, *(leaf for episodes in sets for leaf in episodes))
    return file.getvalue()


def _unpacked(data: bytes) -> list[evaluation.Episodes]:
    if not data:
        return []
    size = len(evaluation.Episodes._fields)
    # No pickle: anyone who reaches the port may have sent it.
    with np.load(io.BytesIO(data), allow_pickle=False) as leaves:
        flat = [leaves[f"arr_{index}"] for index in range(len(leaves))]
    return [evaluation.Episodes(*flat[at : at + size]) for at in range(0, len(flat), size)]
