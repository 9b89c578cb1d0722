#!/usr/bin/env bash
# Trains under Slurm, on one node or on many; submitted from the root of the repository:
#   sbatch [--nodes=2 --gpus=8 --cpus-per-task=32 ...] scripts/slurm.sh \
#       --gin_file gin/experiments/snake_ppo.gin --gin_file gin/hardware/gpu.gin
# What stands below is a default: options of sbatch win. The arguments are those of train.py; the run
# directory is runs/slurm-<job> unless --run_dir names another, and lies on a disk that all nodes see.
# Before its time is over the job saves a checkpoint, and goes back to the queue to continue, unless
# the run has finished meanwhile.
#   scripts/slurm.sh --dry-run ARGUMENT ...   prints what would be started, and starts nothing
#SBATCH --job-name=podracers
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
set -euo pipefail

mistake() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

# Prints the words so that a shell reads them back as they are.
quote() {
  local mark="'" escaped="'\\''" word between=''
  for word in "$@"; do
    if [[ ! $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]]; then
      word="'${word//$mark/$escaped}'"
    fi
    printf '%s%s' "$between" "$word"
    between=' '
  done
}

# SIGTERM for the tasks goes through Slurm: srun itself answers one by killing them (SIGKILL), and a
# task that is killed saves nothing. Without --batch, scancel spares the shell that runs this.
end_tasks() {
  signals=$((signals + 1))
  echo "a signal: the tasks save a checkpoint"
  scancel --signal=TERM "$SLURM_JOB_ID" || true
}

# A job that a person cancels, or that Slurm preempts and requeues itself, is not running any more.
is_running() {
  [[ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" == RUNNING ]]
}

main() {
  local dry_run=no argument before='' run_dir=''
  if [[ ${1:-} == --dry-run ]]; then
    dry_run=yes
    shift
  fi
  (($#)) || mistake "no arguments for train.py: sbatch scripts/slurm.sh --gin_file gin/experiments/NAME.gin"
  for argument in "$@"; do
    [[ $before != --run_dir ]] || run_dir="$argument"
    before="$argument"
    case "$argument" in
      --run_dir=*) run_dir="${argument#*=}" ;;
      --dry-run) mistake '--dry-run comes first: scripts/slurm.sh --dry-run ARGUMENT ...' ;;
    esac
  done
  if [[ $dry_run == no && -z ${SLURM_JOB_ID:-} ]]; then
    mistake "not in a Slurm job: submit it with sbatch scripts/slurm.sh, or see --dry-run"
  fi
  # sbatch runs a copy of this file, which lies elsewhere.
  cd "${SLURM_SUBMIT_DIR:-.}"
  [[ -e scripts/train.py ]] || mistake "no scripts/train.py in $PWD: submit from the root of the repository"
  local python="${PODRACERS_PYTHON:-.venv/bin/python}"
  if [[ $dry_run == no ]] && ! command -v "$python" >/dev/null; then
    mistake "no $python: run 'make install' first, or set PODRACERS_PYTHON"
  fi

  # One task that fails would leave the others waiting for it. The job's id stays when it is requeued.
  local command=(srun --kill-on-bad-exit=1 --output=runs/slurm/%j-%t.log --open-mode=append
    "$python" scripts/train.py --distributed --resume_if_begun)
  if [[ -z $run_dir ]]; then
    run_dir="runs/slurm-${SLURM_JOB_ID:-JOB}"
    command+=(--run_dir "$run_dir")
  fi
  command+=("$@")
  if [[ $dry_run == yes ]]; then
    quote "${command[@]}"
    printf '\n'
    return
  fi

  mkdir -p runs/slurm
  export PYTHONUNBUFFERED=1
  # With the platform named, JAX fails where it cannot have the GPUs, and does not take the CPU.
  local platforms=cuda,cpu
  if [[ ${SLURM_GPUS:-0} == 0 && -z ${SLURM_JOB_GPUS:-}${SLURM_GPUS_ON_NODE:-} ]]; then
    platforms=cpu
  fi
  export JAX_PLATFORMS="${JAX_PLATFORMS:-$platforms}"
  # Since Slurm 22.05 srun does not take this over from sbatch.
  [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
  echo "start ${SLURM_RESTART_COUNT:-0} on ${SLURM_JOB_NODELIST:-$(hostname)}: logs in runs/slurm"
  signals=0
  trap end_tasks TERM USR1 USR2
  "${command[@]}" &
  local step=$! code heard
  while true; do
    heard=$signals code=0
    wait "$step" || code=$?
    # A signal ends the wait, not what is waited for.
    ((signals > heard)) || break
  done
  # Also after a signal that reached the tasks alone (--signal=USR1@120).
  if ((code == 0)) && [[ ! -e $run_dir/summary.json ]] && is_running; then
    echo "back to the queue, to continue"
    scontrol requeue "$SLURM_JOB_ID"
  fi
  return "$code"
}

main "$@"
