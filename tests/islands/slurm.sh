#!/usr/bin/env bash
# SLURM on this machine for tests marked `slurm`, from Debian packages. Needs root.
#   slurm.sh start   install what is missing, start three nodes that are all this machine, cancel old jobs
#   slurm.sh stop    end the daemons by their recorded process ids
# LLN puts each job on another node, so that one node's failure hits one of them.
set -euo pipefail
host=$(hostname -s)
nodes=(island-1 island-2 island-3)
case "${1:-}" in
start)
  if ! type slurmctld slurmd sbatch munged &>/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge >/dev/null
  fi
  if ! grep -qs ClusterName=islands /etc/slurm/slurm.conf && [[ -e /etc/slurm/slurm.conf ]]; then
    sinfo >/dev/null && exit 0
    echo "/etc/slurm/slurm.conf is of another cluster; start that one" >&2
    exit 2
  fi
  mkdir -p /run/munge /var/spool/slurmctld /var/spool/slurmd /var/log/slurm /etc/slurm
  chown -R munge:munge /run/munge
  # cred_expire is also how long a requeued job waits: two minutes by default.
  cat >/etc/slurm/slurm.conf <<END
ClusterName=islands
SlurmctldHost=$host(127.0.0.1)
AuthType=auth/munge
AuthInfo=cred_expire=10
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmUser=root
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd/%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd-%n.pid
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/%n.log
SlurmctldParameters=preempt_send_user_signal
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=5,sched_interval=5
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
$(for i in "${!nodes[@]}"; do
    echo "NodeName=${nodes[i]} NodeHostname=$host NodeAddr=127.0.0.1 Port=$((17001 + i)) CPUs=$(nproc) RealMemory=2000 State=UNKNOWN"
  done)
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE LLN=YES State=UP
END
  pgrep -x munged >/dev/null || su -s /bin/sh munge -c /usr/sbin/munged
  pgrep -x slurmctld >/dev/null || slurmctld
  for node in "${nodes[@]}"; do
    mkdir -p "/var/spool/slurmd/$node"
    pgrep -f "slurmd -N $node" >/dev/null || slurmd -N "$node"
  done
  # SLURM keeps jobs over a restart; those of tests that were broken off would hold the nodes.
  squeue --noheader --format=%A | xargs --no-run-if-empty scancel
  for _ in $(seq 60); do
    [[ $(sinfo --noheader --Node --states=idle 2>/dev/null | wc -l) == "${#nodes[@]}" ]] && break
    sleep 0.5
  done
  ;;
stop)
  for file in /run/slurmd-*.pid /run/slurmctld.pid /run/munge/munged.pid; do
    if [[ -f $file ]]; then kill "$(cat "$file")" 2>/dev/null || true; fi
  done
  ;;
*)
  echo "usage: $0 start|stop" >&2
  exit 2
  ;;
esac
