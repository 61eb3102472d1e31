#!/usr/bin/env bash
# The router of a cluster that `ray up` brings up: on the head, or on a node of its own.
#
#   router.sh start         start it; one that runs finishes its streams first, so this also takes a new version
#   router.sh start-here    the same if this is the node that router.env names
#   router.sh stop          finish what is running, then end
#   router.sh status        the pool as the router sees it; exit code 1 when no replica is READY
set -euo pipefail

source ~/graphpool/deploy/node/router.env
source ~/graphpool-env/bin/activate
pid_file=~/graphpool-router.pid
log_file=~/graphpool-router.log

keep_running() {
    trap 'kill -TERM "$router"; wait "$router"; exit' TERM
    # It ends with 0 only when it was told to end.
    until
        graphpool router "${ROUTER_OPTIONS[@]}" &
        router=$!
        wait "$router"
    do sleep 1; done
}

start() {
    stop
    setsid bash "$0" keep-running >>"$log_file" 2>&1 </dev/null &
    echo $! >"$pid_file"
}

is_ours() { grep -qsF router.sh "/proc/$1/cmdline"; }

stop() {
    local pid
    pid=$(cat "$pid_file" 2>/dev/null) || return 0
    # After a restart of the machine the number may be somebody else's.
    if is_ours "$pid"; then kill -TERM "$pid"; fi
    while is_ours "$pid"; do sleep 0.2; done
    rm -f "$pid_file"
}

is_here() {
    # `ray up` tells every node but the head itself where the head is.
    if [ "$ROUTER_HOST" = head ]; then [ -z "${RAY_HEAD_IP:-}" ]; else hostname -I | grep -qwF "$ROUTER_HOST"; fi
}

case "${1:-}" in
start) start ;;
start-here) if is_here; then start; fi ;;
stop) stop ;;
keep-running) keep_running ;;
status) graphpool status --address "127.0.0.1:$ROUTER_PORT" "${CLIENT_OPTIONS[@]}" ;;
*) sed -n '2,7p' "$0" >&2; exit 2 ;;
esac
