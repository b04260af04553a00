#!/bin/bash
# The tables of passes and the language models on two cards: tunes what they need, then times both at once. Run it in the
# repository's root; all output goes to $OUT (/tmp/models-out). SECONDS_IN_ALL (1200) bounds all of it; each part has a
# limit and leaves what it has by then.
set -um  # m: else what runs behind an ampersand ignores Ctrl-C
name=models all=${SECONDS_IN_ALL:-1200} least=12 grace=10
source "$(dirname "$0")/limited.sh"

finish() {
  [ -d "$here/autoattn" ] && (cd "$here/autoattn" && find . -name '*.json' -exec cp --parents {} "$here/r/" \;)
  {
    echo "== times"; cat "$here/r/times.txt"
    echo "== tune"; tail -n 5 "$here/r/tune.txt"
    for one in seed model model-large model-fp32 model-compiled; do
      echo "== $one"; grep -aE "^\[|ended with|no time left|autoattn:|Error" "$here/r/$one.txt" 2>/dev/null | cut -c1-230
    done
  } 2>/dev/null | tee "$result/models.txt"
  tar -C "$here" -czf "$result/models.tar.gz" r
}
trap finish EXIT
{ date; nproc; nvidia-smi --query-gpu=name,driver_version --format=csv,noheader; git log --oneline -1; } > "$here/r/machine.txt" 2>&1
cat "$here/r/machine.txt"

note "tune begins"
for group in passes:passes-gradients language_models:language-models-training language_models:language-models-training-float32; do
  limited "${TUNE_SECONDS:-300}" "$python" -m autoattn tune --device auto --shapes "benchmarks/shapes/${group%:*}.yaml" --group "${group#*:}" --effort quick >> "$here/r/tune.txt" 2>&1
done
note "tune ended"

chain0() {
  export CUDA_VISIBLE_DEVICES=${cards[0]}
  note "passes begins"
  limited 340 "$python" -m autoattn bench passes --seconds 0.06 --out "$here/r/seed" > "$here/r/seed.txt" 2>&1
  note "passes ended; compiled begins"
  limited 150 "$python" -m autoattn bench model --models S --contexts 2048 --attention autoattn,sdpa,naive --dtype bf16 --modes compiled --limit 20 --out "$here/r/model-compiled" > "$here/r/model-compiled.txt" 2>&1
  note "compiled ended"
}
chain1() {
  export CUDA_VISIBLE_DEVICES=${cards[1]}
  note "models begin"
  limited 200 "$python" -m autoattn bench model --models S,M --contexts 256,512,1024,2048,4096,8192 --attention autoattn,naive,sdpa --dtype bf16 --modes eager --limit 12 --out "$here/r/model" > "$here/r/model.txt" 2>&1
  note "S, M ended; large ones begin"
  limited 300 "$python" -m autoattn bench model --models L,XL,2.7B --contexts 256,512,1024,2048,4096 --attention autoattn,naive,sdpa --dtype bf16 --modes eager --steps 5 --limit 12 --out "$here/r/model-large" > "$here/r/model-large.txt" 2>&1
  note "large ones ended; fp32 begins"
  limited 40 "$python" -m autoattn bench model --models S --contexts 2048 --attention autoattn,naive,sdpa --dtype fp32 --modes eager --limit 12 --out "$here/r/model-fp32" > "$here/r/model-fp32.txt" 2>&1
  note "fp32 ended"
}
chain0 & first=$!
chain1 & second=$!
wait "$first" "$second"
note "all ended"
