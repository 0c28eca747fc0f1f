#!/usr/bin/env bash
# Starts one run on several machines over ssh and stays until all have ended. Each machine needs this
# checkout (or the installed package) and the run's TOML file at the same place. Ctrl-C, or losing the
# connection, asks every node to finish its step, save and leave; start the same command to go on.
set -euo pipefail

usage="usage: ssh.sh [--dry-run] [--dir DIR] [--aedit PROGRAM] [--master HOST:PORT] RUN.toml HOST... [-- FLAGS]"
refuse() {
    printf 'ssh.sh: %s; %s\n' "$1" "$usage" >&2
    exit 2
}

dry_run=false dir=$PWD aedit=aedit master="" hosts=() flags=()
while [[ $# -gt 0 && $1 == --* ]]; do
    case $1 in
        --help) printf '%s\n' "$usage" && exit 0 ;;
        --dry-run) dry_run=true && shift && continue ;;
        --dir | --aedit | --master) ;;
        *) refuse "unknown option $1" ;;
    esac
    [[ $# -ge 2 && -n $2 ]] || refuse "$1 needs a value"
    printf -v "${1#--}" '%s' "$2"
    shift 2
done

[[ $# -ge 1 ]] || refuse "RUN.toml is missing"
run_toml=$1
shift
[[ $run_toml == *.toml ]] || refuse "expected a .toml file, got $run_toml"
while [[ $# -gt 0 && $1 != -- ]]; do
    [[ $1 != -* ]] || refuse "flags of the run go after --, got $1"
    hosts+=("$1")
    shift
done
[[ ${#hosts[@]} -ge 1 ]] || refuse "at least one HOST is needed"
[[ $# -eq 0 ]] || flags=("${@:2}")
# 29500 is the port torchrun users expect; of user@host, the other machines need the host.
[[ -n $master ]] || master="${hosts[0]#*@}:29500"

# What ssh runs on machine number $1.
node_command() {
    local words=("$aedit" run "$run_toml" --nodes "${#hosts[@]}" --node "$1" --master "$master")
    printf 'cd %q && exec' "$dir"
    printf ' %q' "${words[@]}" ${flags[@]+"${flags[@]}"}
}

# Says whose line it is, as soon as it comes; sed and tr would keep lines back.
label() {
    local line
    trap '' INT TERM HUP
    while IFS= read -r line || [[ -n $line ]]; do
        printf '[%s] %s\n' "$1" "${line%$'\r'}"
    done
}

# The terminal (-tt) is what lets a node hear that we have gone: it is hung up on.
ssh=(ssh -tt -o BatchMode=yes -o ServerAliveInterval=15)

pids=()
leave() {
    trap '' INT TERM HUP
    kill -TERM "${pids[@]}" 2>/dev/null || true
    wait
    exit "$1"
}

if ! $dry_run; then
    trap 'leave 130' INT
    trap 'leave 143' TERM HUP
fi
for node in "${!hosts[@]}"; do
    words=("${ssh[@]}" "${hosts[node]}" "$(node_command "$node")")
    if $dry_run; then
        printf '%q ' "${words[@]}"
        printf '\n'
    else
        # A dumb terminal gets plain lines instead of a picture that is redrawn.
        TERM=dumb "${words[@]}" </dev/null > >(label "$node ${hosts[node]}") 2>&1 &
        pids+=($!)
    fi
done
for _ in ${pids[@]+"${pids[@]}"}; do
    # When one fails the others cannot go on: they are told to leave too. Of those that have been waited
    # for already, wait says that it does not know them.
    wait -n "${pids[@]}" 2>/dev/null || leave $?
done
