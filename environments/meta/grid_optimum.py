"""The exact optimum of a tabular grid world with a time limit, by dynamic programming in NumPy.

Axis legend: `C` cells, `N` objects, `K = 2 ** N` sets of present objects, as bits.
"""

import numpy as np


def finite_horizon_values(
    neighbours: np.ndarray,
    object_cell: np.ndarray,
    objects: np.ndarray,
    collects_on_arrival: bool,
    num_steps: int,
) -> np.ndarray:
    """Returns the highest expected undiscounted return of an episode, from every state.

    Args:
      neighbours: `[C, 9]`, destination of each move.
      object_cell: `[N]`, distinct cells of the objects.
      objects: `[N, 3]`, their rewards, probabilities of termination and of respawn.
      collects_on_arrival: whether moves collect; otherwise nine other actions collect.
      num_steps: time limit.

    Returns:
      `[C, K]`, with `num_steps` remaining steps.
    """
    num_cells, num_objects = neighbours.shape[0], len(object_cell)
    values = np.zeros((num_cells, 1 << num_objects))
    for _ in range(num_steps):
        later = _after_respawn(values, objects[:, 2])
        if collects_on_arrival:
            arrival = later.copy()  # value of arriving in a cell, including collection
            for index, cell in enumerate(object_cell):
                _collect(arrival[cell], values[cell], objects, index)
            values = np.max(arrival[neighbours], axis=1)
            continue
        best = np.max(later[neighbours], axis=1)
        for index, cell in enumerate(object_cell):
            near = np.any(neighbours == cell, axis=1)  # cells from which it can be collected
            collected = later[near]
            _collect(collected, values[near], objects, index)
            best[near] = np.maximum(best[near], collected)
        values = best
    return values


def _after_respawn(values: np.ndarray, respawn: np.ndarray) -> np.ndarray:
    """Returns expected values `[..., K]` before absent objects respawn with probabilities `[N]`."""
    for index, probability in enumerate(respawn):
        absent = _absent(values.shape[-1], index)
        expected = values.copy()
        expected[..., absent] += probability * (
            values[..., absent | 1 << index] - values[..., absent]
        )
        values = expected
    return values


def _collect(target: np.ndarray, values: np.ndarray, objects: np.ndarray, index: int) -> None:
    """Writes the value of collecting an object into `target` `[..., K]`, where it is present.

    `values` `[..., K]` are those after the step. The object does not respawn in the same step.
    """
    reward, termination, _ = objects[index]
    respawn = np.where(np.arange(len(objects)) == index, 0.0, objects[:, 2])
    absent = _absent(values.shape[-1], index)
    later = _after_respawn(values, respawn)[..., absent]
    target[..., absent | 1 << index] = reward + (1.0 - termination) * later


def _absent(num_sets: int, index: int) -> np.ndarray:
    sets = np.arange(num_sets)
    return sets[(sets >> index & 1) == 0]
