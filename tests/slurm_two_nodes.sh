#!/usr/bin/env bash
# A Slurm of two nodes on this machine, for tests: needs root, and Debian's packages slurm-wlm and munge.
# Requeued jobs start again after the short life of credentials (cred_expire).
#   slurm_two_nodes.sh start DIR    starts munged, slurmctld and two slurmd; prints the SLURM_CONF to export
#   slurm_two_nodes.sh stop DIR     ends what start began, by the ids that it kept in DIR
# The nodes are called n1 and n2 and have two cores each; jobs of the partition `urgent` preempt others. The names
# are added to /etc/hosts, because tasks look each other up by name.
set -euo pipefail
command=${1:?start or stop} dir=$(mkdir -p "${2:?a folder}" && cd "$2" && pwd)
if [[ $command == stop ]]; then
  mapfile -t daemons < <(cat "$dir"/*.pid 2>/dev/null)
  kill "${daemons[@]}" 2>/dev/null || true
  # A slurmd may outlast it while it reports a job that ended.
  for _ in $(seq 20); do kill -0 "${daemons[@]}" 2>/dev/null && sleep 0.5; done
  kill -KILL "${daemons[@]}" 2>/dev/null || true
  sed -i '/^127\.0\.0\.1 n1 n2$/d' /etc/hosts 2>/dev/null || true
  exit 0
fi
host=$(hostname -s)
mkdir -p "$dir"/state "$dir"/spool-n1 "$dir"/spool-n2
cat >"$dir/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
AuthType=auth/munge
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/ctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/ctld.log
SlurmdLogFile=$dir/slurmd-%n.log
SlurmUser=root
ReturnToService=2
JobRequeue=1
KillWait=30
SlurmdTimeout=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n[1-2] NodeHostname=$host NodeAddr=127.0.0.1 Port=[17001-17002] CPUs=2 RealMemory=8000 State=UNKNOWN
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=n[1-2] MaxTime=INFINITE State=UP PriorityTier=2
CONF
grep -q '^127\.0\.0\.1 n1 n2$' /etc/hosts || echo '127.0.0.1 n1 n2' >>/etc/hosts
mkdir -p /run/munge /var/lib/munge /var/log/munge
chown -R munge:munge /run/munge /var/lib/munge /var/log/munge /etc/munge
munge -n 2>/dev/null | unmunge >/dev/null 2>&1 || {
  su -s /bin/bash munge -c "/usr/sbin/munged --pid-file=/run/munge/munged.pid"
  cp /run/munge/munged.pid "$dir/munged.pid"
}
export SLURM_CONF=$dir/slurm.conf
slurmctld -f "$SLURM_CONF"
sleep 2
for node in n1 n2; do slurmd -N "$node" -f "$SLURM_CONF"; done
for _ in $(seq 20); do [[ $(sinfo -h -o %t 2>/dev/null) == idle ]] && break; sleep 0.5; done
sinfo >&2
echo "$SLURM_CONF"
