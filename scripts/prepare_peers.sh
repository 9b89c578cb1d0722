#!/bin/sh
# Prepares the other codebases that `scripts/benchmark.py peers` measures beside this project:
#   scripts/prepare_peers.sh DIR
# Needs git. Cleanba runs with the versions of its time, in their own environment.
set -eu
dir=${1:?usage: scripts/prepare_peers.sh DIR}
python=$(dirname "$0")/../.venv/bin/python

checkout() { # URL COMMIT FOLDER
  name=$dir/$(basename "$1")
  [ -d "$name" ] || git clone --quiet --no-checkout --filter=blob:none "$1" "$name"
  git -C "$name" sparse-checkout set "$3"
  git -C "$name" checkout --quiet "$2"
}

# PureJaxRL and rejax fail with gymnax 1.0; Pgx's example and they share this project's other packages.
"$python" -m pip install --quiet --no-deps --upgrade --target "$dir/packages" gymnax==0.0.9 rejax==0.1.3 \
  dm-haiku==0.0.17 jmp==0.0.4 tabulate==0.10.0
touch "$dir/packages/navix.py" # PureJaxRL imports it; its PPO does not use it
checkout https://github.com/luchris429/purejaxrl 31756b197773a52db763fdbe6d635e4b46522a73 purejaxrl
checkout https://github.com/sotetsuk/pgx 079b2d730e3845c25d49d99e0ccf9a374dd04cb9 examples/alphazero
checkout https://github.com/vwxyzjn/cleanba d1f8979c33e4e1c3d4e67f460afcebb42b6889d4 cleanba
[ -d "$dir/cleanba-env" ] || "$python" -m venv "$dir/cleanba-env"
install="$dir/cleanba-env/bin/python -m pip install --quiet"
$install --no-deps jax==0.4.13 jaxlib==0.4.13 chex==0.1.82 flax==0.6.11 optax==0.1.5 rlax==0.1.6 \
  distrax==0.1.3 optree==0.11.0 gymnasium==0.29.1 envpool==0.8.4 tensorboardX==2.6.2.2 gym==0.23.1 \
  gym-notices==0.0.8 types-protobuf
$install 'numpy<1.25' 'scipy<1.11' ml_dtypes==0.3.1 opt_einsum tyro==0.5.3 \
  tensorflow-probability==0.20.1 dm-env dm-tree msgpack rich cloudpickle toolz 'protobuf<5' \
  farama-notifications typing_extensions pyyaml packaging
