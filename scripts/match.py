"""Plays a round robin of a two-player game: podracers-match PLAYER PLAYER [...] [--games 200].

A PLAYER is a run directory (its newest checkpoint; `DIR@best` and `DIR@STEP` name another one), or
`random`, `greedy` (a win where there is one), `uct:SIMULATIONS` or `perfect` (tic-tac-toe). At
least one is a run, unless `--game` names a game of Pgx.

Each pair plays from openings of random moves, each opening once with either player in the first
seat. Openings differ in their last position, so no two games of a pair are the same. Ratings are
Bradley-Terry's, in the units of Elo, with mean 0; a draw counts as half a win, and each two players
have one virtual draw. Their 95% intervals are a bootstrap over openings. The same command and seed
play the same games.
"""

import argparse
import dataclasses
import functools
import itertools
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.figure
import matplotlib.pyplot as plt
import numpy as np

from environments import opponents, pgx
from podracers import errors
from podracers.commands import command_line
from podracers.scripts.results import plotting

_ELO = 400.0 / np.log(10.0)
_NUM_BOOTSTRAPS = 200
_BATCH = 50  # openings that are played at once
_SIMPLE = {
    "random": opponents.Random,
    "greedy": opponents.Greedy,
    "perfect": opponents.Perfect,
}


def main() -> int:
    """Parses the command line, plays, and prints results and ratings."""
    options = _parse()
    command_line.use_compilation_cache()
    players = {name: _player(name) for name in options.players}
    if len(players) < len(options.players) or len(players) < 2:
        raise errors.UserError(
            f"expected two or more different players, got {' '.join(options.players)}"
        )
    game = _game(options, players)
    count = -(-options.games // 2)
    keys = openings(game, count, options.opening_moves, options.seed)
    scores = np.full((len(players), len(players), count, 2), np.nan)
    for (i, first), (j, second) in itertools.combinations(enumerate(players), 2):
        results = play(game, players[first], players[second], keys)  # [N, 2]
        scores[i, j], scores[j, i] = results, 1.0 - results
        wins, draws = (results == 1.0).sum(), (results == 0.5).sum()
        print(f"{first} - {second}: {wins} won, {draws} drawn, {results.size - wins - draws} lost")
    elo, interval = ratings(scores, options.seed)
    labels = _labels(players)
    print(table(labels, scores, elo, interval))
    if options.out:
        plotting.save(picture(labels, elo, interval, game.name), options.out)
        print(options.out)
    return 0


def _parse() -> argparse.Namespace:
    parser = command_line.Parser(description=__doc__)
    add = parser.add_argument
    add("players", **command_line.SEVERAL, metavar="PLAYER")
    add("--games", type=command_line.count, default=200, help="of each pair (%(default)s)")
    add("--game", help="a game of Pgx (default: that of the runs)")
    moves = "random moves of an opening (%(default)s)"
    add("--opening_moves", type=command_line.count, default=4, metavar="N", help=moves)
    add("--seed", type=int, default=0)
    add("--out", type=command_line.output_file, metavar="FILE.png", help="draw the ratings")
    return parser.parse_args()


def _player(name: str) -> opponents.Opponent:
    """Returns the player of a name on the command line."""
    kind, _, number = name.partition(":")
    if kind == "uct":
        if not number.isdecimal() or int(number) < 1:
            raise errors.UserError(f"{name}: expected uct:SIMULATIONS, such as uct:100")
        return opponents.UCT(int(number))
    if name in _SIMPLE:
        return _SIMPLE[name]()
    path, _, step = name.partition("@")
    if not pathlib.Path(path).is_dir():
        near = errors.nearest(name, [*_SIMPLE, "uct:100"])
        raise errors.UserError(f"there is no run '{path}', and no player of that name{near}")
    if step not in ("", "best") and not step.isdecimal():
        raise errors.UserError(f"{name}: expected {path}@best or {path}@STEP")
    return opponents.Run(path, int(step) if step.isdecimal() else None, step == "best")


def _labels(players: dict[str, opponents.Opponent]) -> list[str]:
    """Returns the players' names, those of runs without the folder of all of them."""
    paths = {x: os.path.abspath(x) for x, y in players.items() if isinstance(y, opponents.Run)}
    folder = os.path.commonpath([os.path.dirname(path) for path in paths.values()] or ["."])
    return [os.path.relpath(paths[name], folder) if name in paths else name for name in players]


def _game(options: argparse.Namespace, players: dict[str, opponents.Opponent]) -> pgx.Pgx:
    """Returns the game of all players, with random openings."""
    games: dict[str, Any] = {}
    if options.game is not None:
        games[options.game] = pgx.Pgx(options.game)
    for name, player in players.items():
        if isinstance(player, opponents.Run):
            played = player.policy.parts.environment
            against = getattr(played, "evaluation_environment", played)
            game = getattr(against, "game", against)
            if game.spec.players != 2:
                raise errors.UserError(f"{name}: {game.spec.name} is no game of two players")
            games.setdefault(game.spec.name, game)
    if len(games) != 1:
        raise errors.UserError(f"expected players of one game, got {', '.join(games) or 'none'}")
    game = next(iter(games.values()))
    while not isinstance(game, pgx.Pgx):  # its wrappers
        game = game.environment
    return dataclasses.replace(game, opening_moves=options.opening_moves)


def openings(game: pgx.Pgx, count: int, moves: int, seed: int) -> jax.Array:
    """Returns keys `[N]` of games whose openings differ.

    Raises:
      errors.UserError: there are fewer different openings than games.
    """
    drawn = jax.random.split(jax.random.key(seed), 32 * count)
    _, timestep = jax.jit(jax.vmap(game.reset))(drawn)
    rows = np.asarray(timestep.observation["observation"]).reshape(len(drawn), -1)
    _, first = np.unique(rows, axis=0, return_index=True)
    if len(first) < count:
        raise errors.UserError(
            f"{game.name} has about {len(first)} openings of up to {moves} random moves, expected "
            f"{count} different ones: use fewer --games or more --opening_moves"
        )
    return drawn[np.sort(first)[:count]]


def play(
    game: pgx.Pgx, player: opponents.Opponent, other: opponents.Opponent, keys: jax.Array
) -> np.ndarray:
    """Returns the player's scores `[N, 2]`: 1, 0.5 or 0, in the first and in the second seat."""
    against = opponents.Against(game, other)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None))
    @functools.partial(jax.vmap, in_axes=(None, 0))
    def score(key: jax.Array, is_first: jax.Array) -> jax.Array:
        state, timestep = against.begin(key, is_first)

        def move(carry):
            state, _, memory, key = carry
            key, act_key = jax.random.split(key)
            action, memory = player.act(game, memory, state.game, state.timestep, act_key)
            return *against.step(state, action), memory, key

        start = state, timestep, player.init(game), jax.random.fold_in(key, 1)
        timestep = jax.lax.while_loop(lambda carry: ~carry[1].last(), move, start)[1]
        return 0.5 * (jnp.sign(timestep.reward) + 1.0)

    seats = np.array([True, False])
    size = min(_BATCH, len(keys))
    batches = [keys[np.arange(i, i + size) % len(keys)] for i in range(0, len(keys), size)]
    return np.concatenate([np.asarray(score(batch, seats)) for batch in batches])[: len(keys)]


def ratings(scores: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns ratings `[P]` and their 95% intervals `[2, P]` from scores `[P, P, N, 2]`.

    The scores of players against themselves are NaN.
    """
    count = scores.shape[2]
    rng = np.random.default_rng(seed)
    samples = [_fit(scores[:, :, rng.integers(count, size=count)]) for _ in range(_NUM_BOOTSTRAPS)]
    return _fit(scores), np.percentile(samples, (2.5, 97.5), axis=0)


def _fit(scores: np.ndarray) -> np.ndarray:
    """Returns Bradley-Terry ratings `[P]`.

    Hunter, "MM algorithms for generalized Bradley-Terry models", 2004,
    https://doi.org/10.1214/aos/1079120141.
    """
    wins = np.nan_to_num(scores.sum(axis=(2, 3)))  # [P, P]
    games = wins + wins.T + (wins + wins.T > 0.0)  # with a virtual draw
    wins = wins.sum(axis=1) + 0.5 * (games > 0.0).sum(axis=1)
    strength = np.ones(len(wins))
    for _ in range(1000):
        strength = wins / (games / (strength[:, None] + strength)).sum(axis=1)
        strength /= np.exp(np.log(strength).mean())
    return _ELO * np.log(strength)


def table(names: Sequence[str], scores: np.ndarray, elo: np.ndarray, interval: np.ndarray) -> str:
    """Returns the players by rating, with the share of points against each other one."""
    shares, order = scores.mean(axis=(2, 3)), np.argsort(-elo)
    width = max(len("player"), *map(len, names))
    header = f"{'':2} {'player':{width}} rating  95% interval  points"
    lines = [header + "".join(f"{n + 1:>7}" for n in range(len(names)))]
    for place, i in enumerate(order):
        low, high = interval[:, i]
        rating = f"{elo[i]:+6.0f}  {low:+5.0f} to {high:+5.0f} {np.nanmean(shares[i]):7.1%}"
        cells = "".join(f"{'':>7}" if i == j else f"{shares[i, j]:7.1%}" for j in order)
        lines.append(f"{place + 1:2} {names[i]:{width}} {rating}{cells}")
    return "\n".join(lines)


def picture(
    names: Sequence[str], elo: np.ndarray, interval: np.ndarray, game: str
) -> matplotlib.figure.Figure:
    """Returns a figure of the ratings with their intervals, the best on top."""
    order = np.argsort(elo)
    figure, axis = plt.subplots(figsize=(7.0, 1.2 + 0.35 * len(names)), layout="constrained")
    error = np.abs(interval - elo)[:, order]
    axis.errorbar(elo[order], range(len(names)), xerr=error, fmt="o", color="#3478c8", capsize=3)
    axis.set_yticks(range(len(names)), [names[i] for i in order])
    figure.suptitle(f"{game}: Bradley-Terry ratings and 95% intervals", fontsize=9)
    axis.set_xlabel("Elo")
    axis.grid(axis="x", color="#e4e6ea")
    axis.spines[["top", "right"]].set_visible(False)
    return figure


command = functools.partial(command_line.run, main)

if __name__ == "__main__":
    command()
