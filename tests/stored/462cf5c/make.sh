#!/usr/bin/env bash
# How this folder was made. `autosel` is that of commit 462cf5c; the clock and the noise of the machine decide the rest.
export AUTOSEL_HOME=$PWD/home PYTHONPATH=$PWD/plugins AUTOSEL_ALLOW=stored
mkdir json
python model.py tiny
autosel fingerprint --json > json/fingerprint.json
autosel tune --model tiny --seq 256 --json > json/tune-tiny.json
autosel tune --model tiny --seq 256 --op gemv_fp8 --op attn_decode_fp8 --json
autosel tune --model llama-1b --seq 512 --op rmsnorm --op attn --op gate_up --json > json/tune-llama.json
# user:attn_decode_fp8 failed its proof (a NaN in q) and was mended here: gemv_fp8, in the same file, is renewed
autosel tune --model tiny --seq 256 --op swiglu --force --json > json/tune-swiglu.json
autosel tune --model tiny --seq 256 --op gemv_fp8 --op attn_decode_fp8 --force --json > json/tune-fp8.json
autosel tune --model tiny --seq 128 --dtype fp32 --op rmsnorm --op rope --op kv_append --json > json/tune-fp32.json

n=1
certify() { autosel run "$@" --certify certificates.jsonl --json > "json/run-$n.json"; n=$((n + 1)); }
certify --model llama-1b --layers 1 --seq 128 --iters 24 --no-persistent
certify --model llama-1b --layers 2 --seq 128 --iters 24 --persistent
certify --model llama-1b --layers 1 --seq 64 --iters 24 --advance --speculate ngram:3 --prompt synthetic
certify --model tiny --seq 128 --iters 24 --no-persistent
certify --model tiny --seq 128 --iters 24 --persistent --no-packed --sign
certify --model tiny --seq 128 --iters 24 --batch 2 --paged 16 --dtype fp32 --layers 1
certify --model tiny --seq 128 --iters 24 --advance --temperature 0.8 --top-k 20 --no-prealloc
certify --model tiny --weights random --seq 128 --iters 24

autosel demote 12 --reason "wrong token in request 7" --json > json/demote.json
autosel pin 17 --reason "frozen for the release" --json > json/pin.json
autosel promote 39 user:attn_decode_fp8 --reason "measured on the production trace" --json > json/promote.json
autosel demote 37 --reason "slow in production" --json > json/demote-fp8.json
autosel lock --file autosel.lock --json > json/lock.json
autosel export --sign bundle.json
for op in linear attn rmsnorm swiglu gemv_fp8 attn_decode_fp8 step; do
    autosel best $op --json > json/best-$op.json
    autosel explain $op --json > json/explain-$op.json
done
autosel explain --failed --json > json/explain-failed.json
autosel history --json -n 100 > json/history.json
autosel db info --json > json/db-info.json
autosel verify certificates.jsonl --json > json/verify.json
