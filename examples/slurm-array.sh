#!/usr/bin/env bash
#SBATCH --job-name=aoquant
#SBATCH --cpus-per-task=8
#SBATCH --mem=16G
#SBATCH --time=02:00:00
#
# Quantize the components of a pipeline in parallel, each on a machine of its own, and join the results.
#
#   examples/slurm-array.sh MODEL OUT COMPONENT=CONFIG...
#   examples/slurm-array.sh FLUX.1-dev flux-int8 transformer=int8wo text_encoder_2=int8wo
#
# Run it where sbatch is, with aoquant on PATH; OUT and HF_HOME on a disk that every machine sees. It plans the whole
# (no weights are downloaded), submits one array task a component, and a job that joins them once all have succeeded.
set -euo pipefail

step=submit
case ${1:-} in part | join) step=$1; shift ;; esac
if (($# < 3)); then
    echo "usage: $0 MODEL OUT COMPONENT=CONFIG..." >&2
    exit 2
fi
model=$1 out=$2
shift 2

case $step in
submit)
    components=()
    for component in "$@"; do components+=(--component "$component"); done
    plan=$(aoquant plan "$model" "${components[@]}" -o "$out" --json)
    # One commit for all machines, whatever is pushed meanwhile. A local folder has none.
    commit=$(python3 -c 'import json, sys; print(json.load(sys.stdin)["source"]["revision"] or "")' <<< "$plan")
    if [[ -n $commit ]]; then model=${model%%@*}@$commit; fi
    array=$(sbatch --parsable --array="0-$(($# - 1))" "$0" part "$model" "$out" "$@")
    sbatch --dependency="afterok:${array%%;*}" --kill-on-invalid-dep=yes "$0" join "$model" "$out" "$@"
    ;;
part)
    components=("$@")
    component=${components[SLURM_ARRAY_TASK_ID]}
    aoquant quantize "$model" --component "$component" -o "$out.parts/${component%%=*}" --overwrite
    ;;
join)
    parts=()
    for component in "$@"; do parts+=("$out.parts/${component%%=*}"); done
    aoquant join "$out" "${parts[@]}"
    aoquant verify "$out"
    rm -r "$out.parts"
    ;;
esac
