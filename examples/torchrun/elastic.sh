#!/usr/bin/env bash
# Runs a recipe under torchrun's elastic agent; start it on every node, with the same HOST.
#
#   HOST=node1 NNODES=2 NPROC=8 ./elastic.sh recipe.yaml [--FIELD VALUE ...]
#
# When a rank fails or a node leaves, the agents end all ranks and start them again, up to MAX_RESTARTS times: the run
# resumes from its newest complete checkpoint. With NNODES=1:2 it also goes on with fewer nodes, and a node that comes
# (back) restarts the ranks: a checkpoint restores on any number of ranks.
#
# Exits with 75 if a signal interrupted the run and it is to be continued, although torchrun itself exits with 1 then.

set -euo pipefail

HOST=${HOST:-$(hostname)}
PORT=${PORT:-29400}
NNODES=${NNODES:-1}
NPROC=${NPROC:-1}
MAX_RESTARTS=${MAX_RESTARTS:-3}
RUN_ID=${RUN_ID:-stepmark}
OUTPUT_DIR=${OUTPUT_DIR:?set it to the recipe\'s output_dir}

# Lets rank 0 serve the ranks' store: one that torch 2.9.1's agents serve keeps a node that joins waiting, and all others.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

torchrun --nnodes "$NNODES" --nproc-per-node "$NPROC" --max-restarts "$MAX_RESTARTS" \
    --rdzv-backend c10d --rdzv-endpoint "$HOST:$PORT" --rdzv-id "$RUN_ID" \
    -m stepmark train "$@" --output_dir "$OUTPUT_DIR" --resume_from_checkpoint true --signal_grace 25 &
agent=$!

# torchrun kills its ranks 30 seconds after it gets a signal, hence signal_grace. A shell runs a trap only when `wait`
# returns, so wait again until the agent has ended.
trap 'kill -TERM "$agent" 2>/dev/null || true' TERM USR1
code=0
wait "$agent" || code=$?
while kill -0 "$agent" 2>/dev/null; do
    code=0
    wait "$agent" || code=$?
done

if [[ $code -ne 0 ]] && grep -q '"state": "interrupted"' "$OUTPUT_DIR/status.json" 2>/dev/null; then
    exit 75
fi
exit "$code"
