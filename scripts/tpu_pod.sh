#!/usr/bin/env bash
# Trains on Google Cloud TPU VMs, of one host or of many: creates them, installs the same commit on
# every worker, starts the same command on every worker, follows it, fetches the run, deletes them.
set -euo pipefail

usage() {
  cat <<'END'
usage: scripts/tpu_pod.sh COMMAND --name NAME --zone ZONE [FLAG ...] [-- ARGUMENT ...]

commands
  create   create the TPU VM
  setup    install the commit on every worker
  run      start scripts/train.py on every worker, detached; ARGUMENTs are its own
  follow   print the log of one worker as it grows; Ctrl-C ends the printing only
  stop     ask every worker for a checkpoint and an end in order (SIGTERM)
  fetch    copy the run directory here
  delete   delete the TPU VM, after asking
  train    create, setup, run, and fetch now and then until the run has finished; after a preemption
           the TPU VM is made anew and the run continues. The preempted VM is deleted, with its
           disks, and nothing else: not a TPU VM that is stopped, and nothing at the end.

flags, with the variable that is the default
  --name NAME         of the TPU VM (POD_NAME)
  --zone ZONE         such as us-west4-a (POD_ZONE)
  --project PROJECT   default: gcloud's own (POD_PROJECT)
  --type TYPE         accelerator type, such as v5litepod-16 (POD_TYPE)
  --version VERSION   of the TPU's software; default: by type (POD_VERSION)
  --spot              create it of spot capacity, cheaper, which may be preempted
  --reserved          create it of capacity that the project has reserved
  --queued            create it as a queued resource of the same name, which waits for capacity in
                      Google's queue; `delete` and `train` need the flag, too (POD_QUEUED=yes)
  --internal-ip       create it without external addresses, and reach it by internal ones: from a
                      machine in the same network (POD_INTERNAL_IP=yes)
  --repository URL    default: the address in setup.cfg (POD_REPOSITORY)
  --ref REF           a commit, tag or branch of this checkout that is pushed; default: HEAD (POD_REF)
  --run_dir PATH      on the workers, relative to the repository; default: runs/NAME (POD_RUN_DIR)
  --before COMMAND    on every worker before the installation, such as mounting a shared disk
  --workers N         from how many workers, 0 on, files are fetched; default: 1, which writes the run
  --out PATH          where fetch copies to, as PATH/worker-0, ...; default: runs/pods/NAME
  --worker N          whose log `follow` prints; default: 0
  --lines N           how many lines `follow` begins with; default: 100
  --poll SECONDS      between two looks of `train`; default: 60
  --fetch SECONDS     between two copies of `train`; default: 600
  --restarts N        how often `train` starts a run again that failed; default: 3
  --stall SECONDS     `train` starts a run again whose metrics.jsonl on worker 0 has not grown for so
                      long: more than compiling and an evaluation take; default: 0, never
  --yes               delete without asking
  --dry-run           print every command, quoted for a shell, and run none

exit code: 0; 2 for a mistake on the command line; else that of what failed
END
}

mistake() {
  printf 'error: %s (see --help)\n' "$1" >&2
  exit 2
}

fail() {
  printf 'failed: %s\n' "$1" >&2
  exit 1
}

say() {
  printf '%s\n' "$1" >&2
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

execute() {
  if [[ $dry_run == yes ]]; then
    quote "$@"
    printf '\n'
  else
    "$@"
  fi
}

# gcloud's commands for TPU VMs, or for another `service`, and where this one is.
tpu() {
  execute gcloud compute tpus "${service:-tpu-vm}" "$@" --zone="$zone" ${project:+--project="$project"}
}

# Runs a command of a shell on a worker, or on all of them at once.
on_worker() {
  tpu ssh "$name" --worker="$1" --command="$2" ${internal:+--internal-ip}
}

create() {
  [[ -n $type ]] || mistake 'create needs --type: such as v5litepod-16'
  local software="$version"
  if [[ -z $software ]]; then
    # https://cloud.google.com/tpu/docs/runtimes, "PyTorch and JAX".
    case "$type" in
      v6e-*) software=v2-alpha-tpuv6e ;;
      v5p-*) software=v2-alpha-tpuv5 ;;
      v5litepod-*) software=v2-alpha-tpuv5-lite ;;
      v[234]-*) software=tpu-ubuntu2204-base ;;
      *) mistake "no software version is known for the type '$type': give --version" ;;
    esac
  fi
  service="${queued:+queued-resources}" tpu create "$name" --accelerator-type="$type" \
    --${queued:+runtime-}version="$software" ${queued:+--node-id="$name"} \
    ${capacity:+--$capacity} ${internal:+--internal-ips}
}

# The commit is resolved here and by its full name, so that no worker can have another one, even
# where a branch moves in between.
setup() {
  local commit
  commit="$(git -C "$root" rev-parse --verify --quiet "$ref^{commit}")" ||
    mistake "'$ref' is no commit, tag or branch of this checkout: give --ref"
  if [[ $ref == HEAD && -n "$(git -C "$root" status --porcelain --untracked-files=no)" ]]; then
    say "note: changes that are not committed stay here; the workers get $commit"
  fi
  if [[ -z $repository ]]; then
    repository="$(sed -n 's/^url = //p' "$root/setup.cfg")"
  fi
  # Images with Ubuntu 22.04 have Python 3.10, which is too old.
  on_worker all "set -e
${before:+$before
}python=python3
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || python=python3.11
if ! command -v git make >/dev/null || ! \"\$python\" -c 'import ensurepip, venv' 2>/dev/null; then
  sudo apt-get -qq -o DPkg::Lock::Timeout=300 update
  sudo apt-get -qq -y -o DPkg::Lock::Timeout=300 install git make \"\$python\" \"\$python-venv\"
fi
test -d podracers/.git || git clone --quiet $(quote "$repository") podracers
cd podracers
git fetch --quiet --tags origin
git checkout --quiet --detach $commit
make PYTHON=\"\$python\" EXTRAS=tpu,gcs install
git log -1 --format='installed %H'"
}

# Every worker is looked at before any is started: half a pod would wait for the other half.
run() {
  on_worker all "$(running) && { echo '$name is running already: stop it first' >&2; exit 1; }
true" || return
  local train wrapper
  train="$(quote .venv/bin/python scripts/train.py --distributed --run_dir "$run_dir" \
    --resume_if_begun ${arguments[@]+"${arguments[@]}"})"
  # The signal of `stop` must reach train.py alone, and not the simulators that it started.
  # With the platform named, JAX fails where it cannot have the TPU, and does not take the CPU.
  wrapper="export JAX_PLATFORMS=\"\${JAX_PLATFORMS:-tpu,cpu}\"
PYTHONUNBUFFERED=1 \"\$@\" & echo \$! > ~/$mark.pid
wait \$!
code=\$?
echo \$code > ~/$mark.exit.new
mv ~/$mark.exit.new ~/$mark.exit
rm -f ~/$mark.pid"
  # gcloud repeats a command whose connection broke: it must not start a second run.
  on_worker all "$(running) && exit
cd podracers || exit
rm -f ~/$mark.exit ~/$mark.stopped
setsid bash -c $(quote "$wrapper") bash $train >> ~/$mark.log 2>&1 < /dev/null &"
}

running() {
  printf '%s' "kill -0 \"\$(cat ~/$mark.pid 2>/dev/null)\" 2>/dev/null"
}

follow() {
  on_worker "$worker" "tail -n $lines -F ~/$mark.log"
}

# All are asked before any is waited for: they save a checkpoint together.
stop() {
  on_worker all "touch ~/$mark.stopped; $(running) && kill -TERM \"\$(cat ~/$mark.pid)\"; true"
  on_worker all "for _ in \$(seq 300); do $(running) || exit 0; sleep 1; done
echo '$name still runs 300 s after SIGTERM' >&2; exit 1"
}

# What was fetched before is replaced once the new copy is there: a preemption may come in between.
# A run that began anew, because its directory was lost, does not replace what is further.
fetch() {
  local number copy kept fetched
  for ((number = 0; number < workers; number++)); do
    copy="$out/worker-$number"
    execute mkdir -p "$out"
    execute rm -rf "$out/.worker-$number"
    tpu scp --recurse "$name:$remote_run_dir" "$out/.worker-$number" --worker="$number" \
      ${internal:+--internal-ip} || return
    kept="$(newest_checkpoint "$copy")" fetched="$(newest_checkpoint "$out/.worker-$number")"
    if [[ $dry_run == no ]] && ((kept > fetched)); then
      say "worker $number has checkpoint $fetched, $copy has $kept and stays; or name another --out"
      return 1
    fi
    execute rm -rf "$copy"
    execute mv "$out/.worker-$number" "$copy"
  done
}

# Prints the step of the newest checkpoint of a run directory here, or 0.
newest_checkpoint() {
  local path step newest=0
  for path in "$1"/checkpoints/*; do
    step="${path##*/}"
    if [[ $step =~ ^[0-9]+$ ]] && ((10#$step > newest)); then
      newest=$((10#$step))
    fi
  done
  printf '%s' "$newest"
}

# Puts what was fetched on workers that have nothing, as new ones do without a shared disk. A broken
# connection is no answer, and what was copied by half is no run.
restore() {
  local number found directory partial
  directory="$(quote "$remote_run_dir")" partial="$(quote "$remote_run_dir.partial")"
  for ((number = 0; number < workers; number++)); do
    [[ $dry_run == yes || -d $out/worker-$number ]] || continue
    if [[ $dry_run == yes ]]; then
      look_for_run "$number"
    else
      found="$(look_for_run "$number")" || return 1
      [[ $found != there ]] || continue
      if [[ $found != absent ]]; then
        say "worker $number does not say whether it has $remote_run_dir"
        return 1
      fi
    fi
    tpu scp --recurse "$out/worker-$number" "$name:$remote_run_dir.partial" --worker="$number" \
      ${internal:+--internal-ip} || return 1
    # gcloud repeats a command whose connection broke.
    on_worker "$number" "test -e $directory || mv -T $partial $directory" || return 1
  done
}

# Prints whether a worker has a run: `there` or `absent`. In the second case a copy may begin.
look_for_run() {
  on_worker "$1" "if [ -e $directory ]; then echo there
else mkdir -p $(quote "$(dirname "$remote_run_dir")") && rm -rf $partial && echo absent; fi"
}

delete() {
  if [[ $yes == no && $dry_run == no ]]; then
    local answer=''
    read -r -p "delete the TPU VM $name in $zone, with its disks? [y/N] " answer || true
    [[ $answer == [yY]* ]] || fail 'nothing was deleted'
  fi
  remove
}

remove() {
  service="${queued:+queued-resources}" tpu delete "$name" ${queued:+--force} --quiet
}

# Prints the state of the TPU VM, or of what waits for one, or nothing where there is neither.
state() {
  local of="--filter=name~(^|/)$name\$" found
  found="$(tpu list "$of" --format='value(state)')" || return
  [[ -z $found ]] || printf '%s\n' "$found"
  if [[ -n $queued && ($dry_run == yes || -z $found) ]]; then
    service=queued-resources tpu list "$of" --format='value(state.state)'
  fi
}

# Prints what became of the run on worker 0. Where a run has just ended, its code is written soon.
outcome() {
  on_worker 0 "if $(running); then echo running; exit; fi
if [ -e ~/$mark.pid ] && [ ! -e ~/$mark.exit ]; then sleep 1; fi
if [ -e ~/$mark.stopped ]; then echo stopped
elif [ ! -e ~/$mark.exit ]; then echo interrupted
elif [ \"\$(cat ~/$mark.exit)\" != 0 ]; then echo \"failed \$(cat ~/$mark.exit)\"
elif [ -e $(quote "$remote_run_dir")/summary.json ]; then echo finished
else echo interrupted; fi"
}

# What `train` runs if nothing goes wrong.
rehearse() {
  state
  create
  setup
  restore
  run
  outcome
  fetch
}

# Waits for a TPU VM that can be used, and makes one where there is none. A spot VM may have to wait
# for capacity, and a connection may break: neither ends this.
await_ready() {
  local found=''
  while [[ $found != READY ]]; do
    found="$(state)" || found=unknown
    case "$found" in
      READY) ;;
      '') create || sleep "$poll" ;;
      PREEMPTED | SUSPENDED | FAILED) # cannot be started again; the latter are queued resources
        say "$name: $found; it is made anew"
        remove || sleep "$poll"
        ;;
      STOPPED | STOPPING | TERMINATED) # by somebody who may want its disks
        fail "$name is $found: start it (gcloud compute tpus tpu-vm start), or delete it"
        ;;
      *) # such as CREATING, REPAIRING or WAITING_FOR_RESOURCES
        say "$name: $found"
        sleep "$poll"
        ;;
    esac
  done
}

# Ends what is left of a run whose worker 0 has ended: the others may wait for it.
clear_workers() {
  on_worker all "$(running) || exit 0
kill -TERM \"\$(cat ~/$mark.pid)\"
for _ in \$(seq 60); do $(running) || exit 0; sleep 1; done
kill -KILL \"\$(cat ~/$mark.pid)\""
}

# Starts the run unless it runs, and waits until it has ended; sets `became`.
attempt() {
  became=lost
  await_ready
  became="$(outcome)" || {
    became=lost
    return 0
  }
  [[ $became != finished ]] || return 0
  if [[ $became != running ]]; then
    became=lost
    setup && restore && clear_workers && run || return 0
    became=running
  fi
  local fetched=$SECONDS grown=$SECONDS size='' before_size
  while [[ $became == running ]]; do
    sleep "$poll"
    if [[ "$(state)" != READY ]]; then
      became=gone
      break
    fi
    became="$(outcome)" || became=running # the connection broke: the next look decides
    if ((SECONDS - fetched >= fetch_period)); then
      fetch || say 'it could not be fetched now'
      fetched=$SECONDS
    fi
    ((stall > 0)) && [[ $became == running ]] || continue
    before_size="$size"
    size="$(metrics_size)" || size="$before_size"
    [[ $size == "$before_size" ]] || grown=$SECONDS
    if ((SECONDS - grown >= stall)); then
      became=stalled
      clear_workers || true # where they could not be reached, the next look finds it running
    fi
  done
}

# Prints how many bytes the metrics of worker 0 have.
metrics_size() {
  on_worker 0 "stat --format=%s $(quote "$remote_run_dir/metrics.jsonl") 2>/dev/null || echo 0"
}

train() {
  if [[ $dry_run == yes ]]; then
    rehearse
    return
  fi
  local became='' found failures=0
  found="$(state)" || fail "gcloud cannot say whether there is a TPU VM $name in $zone"
  # Lack of a quota or a wrong type is told at once; only later attempts are repeated.
  [[ -n $found ]] || create
  while true; do
    attempt
    case "$became" in
      finished | stopped)
        fetch || fail "$name: $became, but it could not be fetched"
        say "$name: $became; the run is in $out, and the TPU VM is still there (and paid for)"
        return
        ;;
      'failed 2') # a mistake stays one
        on_worker 0 "tail -n 3 ~/$mark.log" >&2
        exit 2
        ;;
      failed* | lost | interrupted | stalled)
        on_worker 0 "tail -n 20 ~/$mark.log" >&2 || true
        sleep "$poll"
        # A preemption breaks runs and connections, too, and is no failure.
        [[ "$(state)" != READY ]] || failures=$((failures + 1))
        ((failures <= restarts)) || fail "$name: $became, $failures times"
        ;;
    esac
    say "$name: $became; it goes on from its newest checkpoint"
  done
}

read_flags() {
  while (($#)); do
    case "$1" in
      --name | --zone | --project | --type | --version | --repository | --ref | --run_dir | \
        --before | --workers | --out | --worker | --lines | --poll | --fetch | --restarts | --stall)
        (($# > 1)) || mistake "$1 needs a value"
        set_flag "${1#--}" "$2"
        shift 2
        ;;
      --*=*) # --name=NAME
        set -- "${1%%=*}" "${1#*=}" "${@:2}"
        ;;
      --spot | --reserved)
        [[ ${capacity:-${1#--}} == "${1#--}" ]] || mistake 'capacity is --spot or --reserved, not both'
        capacity="${1#--}" && shift
        ;;
      --queued) queued=yes && shift ;;
      --internal-ip) internal=yes && shift ;;
      --yes) yes=yes && shift ;;
      --dry-run) dry_run=yes && shift ;;
      -h | --help) usage && exit 0 ;;
      --)
        arguments=("${@:2}")
        return
        ;;
      *) mistake "unknown argument '$1'; arguments of train.py follow a '--'" ;;
    esac
  done
}

set_flag() {
  case "$1" in
    name | zone | project | type | version | repository | ref | run_dir | before | out)
      printf -v "$1" '%s' "$2"
      ;;
    fetch) number_of "$1" "$2" 0 && fetch_period="$2" ;;
    workers) number_of "$1" "$2" 1 && workers="$2" ;;
    *) number_of "$1" "$2" 0 && printf -v "$1" '%s' "$2" ;;
  esac
}

number_of() {
  [[ $2 =~ ^[0-9]+$ && $2 -ge $3 ]] || mistake "--$1: expected a whole number from $3 on, got '$2'"
}

main() {
  local command="${1:-}"
  case "$command" in
    create | setup | run | follow | stop | fetch | delete | train) shift ;;
    -h | --help) usage && exit 0 ;;
    '') usage >&2 && exit 2 ;;
    *) mistake "unknown command '$command': create, setup, run, follow, stop, fetch, delete or train" ;;
  esac
  read_flags "$@"
  [[ -n $name ]] || mistake 'no --name: which TPU VM'
  # It is a part of file names and of commands on the workers, too.
  [[ $name =~ ^[a-z][a-z0-9-]*$ ]] || mistake "--name: expected lowercase letters, digits and '-', got '$name'"
  [[ -n $zone ]] || mistake 'no --zone: where the TPU VM is'
  if ((${#arguments[@]})) && [[ $command != run && $command != train ]]; then
    mistake "$command takes no arguments of train.py"
  fi
  if [[ $command == run || $command == train ]] && ((${#arguments[@]} == 0)); then
    mistake "$command needs the arguments of train.py: -- --gin_file gin/experiments/NAME.gin"
  fi
  if [[ $dry_run == no ]] && ! command -v gcloud >/dev/null; then
    mistake 'gcloud was not found: install the Google Cloud CLI, or use --dry-run'
  fi
  mark="podracers-$name"
  run_dir="${run_dir:-runs/$name}"
  out="${out:-$root/runs/pods/$name}"
  remote_run_dir="$run_dir"
  [[ $run_dir == /* ]] || remote_run_dir="podracers/$run_dir"
  "$command"
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
name="${POD_NAME:-}" zone="${POD_ZONE:-}" project="${POD_PROJECT:-}" type="${POD_TYPE:-}"
version="${POD_VERSION:-}" repository="${POD_REPOSITORY:-}" ref="${POD_REF:-HEAD}"
run_dir="${POD_RUN_DIR:-}" before='' capacity='' out='' workers=1 worker=0 lines=100
queued="${POD_QUEUED:-}" internal="${POD_INTERNAL_IP:-}"
poll=60 fetch_period=600 restarts=3 stall=0 yes=no dry_run=no
arguments=()
main "$@"
