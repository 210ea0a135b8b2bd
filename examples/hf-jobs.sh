#!/usr/bin/env bash
# Quantize on a machine of Hugging Face Jobs, which pushes the checkpoint to the Hub: nothing is downloaded here.
#
#   examples/hf-jobs.sh MODEL CONFIG REPO_ID [OPTION OF hf jobs run...]
#   examples/hf-jobs.sh FLUX.1-dev int8wo your-name/FLUX.1-dev-int8wo --dry-run
#
# AOQUANT is what pip installs there: a git URL or a wheel's. HF_TOKEN must be able to read MODEL and to write REPO_ID.
# The job ends with aoquant's exit code; a result of more than MAX_SIZE (default 14GB) is not pushed.
set -euo pipefail

if (($# < 3)); then
    echo "usage: AOQUANT=git+https://... $0 MODEL CONFIG REPO_ID [OPTION OF hf jobs run...]" >&2
    exit 2
fi
: "${AOQUANT:?say what pip installs, such as git+https://...}"
model=$1 config=$2 repo_id=$3
shift 3

# Single quotes: the variables are the job's.
# shellcheck disable=SC2016
commands='
pip install --quiet uv
uv pip install --quiet --system --torch-backend cpu "$AOQUANT"
aoquant quantize "$MODEL" --transformer "$CONFIG" --max-size "$MAX_SIZE" --push-to "$REPO_ID" -o checkpoint
'
exec hf jobs run --flavor cpu-xl --timeout 3h --secrets HF_TOKEN "$@" \
    --env "AOQUANT=$AOQUANT" --env "MODEL=$model" --env "CONFIG=$config" --env "REPO_ID=$repo_id" \
    --env "MAX_SIZE=${MAX_SIZE:-14GB}" python:3.12 bash -euc "$commands"
