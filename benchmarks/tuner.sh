#!/bin/bash
# The tuner on two cards: how near quick effort comes to the best of many variants, beside triton.autotune, repeated
# tunes, energy, and one study on two cards. Run it in the repository's root; tables and all output go to $OUT
# (/tmp/tuner-out). ONLY names parts of it (chain0 chain1 both; a, variants a second, is extra). SECONDS_IN_ALL (560)
# bounds all of it; each part has a limit and leaves what it has by then.
set -u
name=tuner all=${SECONDS_IN_ALL:-560} least=15 grace=25
source "$(dirname "$0")/limited.sh"

# Two halves of the cores; the two threads of a core stay in one half.
mapfile -t halves < <("$python" - <<'P'
import os, subprocess
ours = os.sched_getaffinity(0)
try:
    rows = [line.split(",") for line in subprocess.run(["lscpu", "-p=CPU,CORE,SOCKET"], capture_output=True, text=True).stdout.splitlines() if line[:1].isdigit()]
    order = [int(cpu) for cpu, core, socket in sorted(rows, key=lambda row: (int(row[2] or 0), int(row[1] or 0), int(row[0])))]
    order = [cpu for cpu in order if cpu in ours]
except Exception:
    order = []
if set(order) != ours:
    order = sorted(ours)
half = max(1, len(order) // 2)
print(",".join(map(str, order[:half])))
print(",".join(map(str, order[half:] or order)))
P
)
{
  date; nproc; lscpu | grep -E '^(Model name|Thread|Core|Socket|NUMA)'; echo "halves: ${halves[*]}"
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
  git log --oneline -1
} > "$here/r/machine.txt" 2>&1
cat "$here/r/machine.txt"

finish() {
  "$python" - "$here/r" <<'P' 2>&1 | tee "$result/table.txt"
import json, pathlib, re, sys
folder = pathlib.Path(sys.argv[1])
def lines(name):
    path = folder / name
    return path.read_text(errors="replace").splitlines() if path.exists() else []
rows = [json.loads(line) for name in ("b0.jsonl", "b1.jsonl") for line in lines(name)]
print("== (b) quick beside the best of many variants")
for row in rows:
    print(f"  {row['problem']:42s} {row['trials']:3d} tried, {row['seconds']:5.1f} s; best of {row['right']:3d}: {row['best_us']:7.1f} us; winner over it {row['ratio']:.4f}")
if rows:
    print(f"  within 2%: {sum(row['ratio'] <= 1.02 for row in rows)} of {len(rows)}; worst {max(row['ratio'] for row in rows):.4f}; at most {max(row['seconds'] for row in rows):.1f} s, {max(row['run_seconds'] for row in rows):.1f} s a problem over a run")
print("== (c) beside triton.autotune")
for line in lines("c.txt"):
    if re.match(r"(autoattn|triton.autotune):|\|.*\||[0-9.]+ times|ended with", line): print("  " + line)
print("== (d) repeated tunes")
for line in lines("d.txt"):
    if re.match(r"\| bf16|.*tunes in fresh|no tune|ended with|.*Error|.* ended with", line): print("  " + line)
print(f"  tunes that ended: {sum(line.startswith('tune ') for line in lines('d.txt'))}")
print("== (e) energy")
for line in lines("e_table.txt"): print("  " + line)
print("== (f) two cards, one study")
for line in lines("f_table.txt"): print("  " + line)
print("== times")
for line in lines("times.txt"): print("  " + line)
P
  tar -C "$here" -czf "$result/tuner.tar.gz" r
}
trap finish EXIT

# What an entry's caches say: the winner, its time and energy, and its rivals'.
cat > "$here/told.py" <<'P'
import json, pathlib, subprocess, sys
for path in sorted(pathlib.Path(sys.argv[1]).glob("*/forward.triton-*.json")):
    for key, entry in json.loads(path.read_text())["entries"].items():
        times = entry.get("measurement") or {}
        print(key, entry["choice"], entry["template"], f"{times.get('median_us', float('nan')):.1f} us", f"trials {entry['search']['trials']}, objective {entry['search'].get('objective', 'time')}")
        for one in (entry.get("finals") or {}).get("finalists", []):
            used = one.get("energy") or {}
            print("   finalist", one["source_digest"], f"{one['measurement']['median_us']:.1f} us" if one.get("measurement") else "", f"{used['joules'] * 1e3:.2f} mJ {used['watts']:.0f} W" if used else "no energy", "tied" if one.get("tied") else "")
        for one in entry.get("rivals", []):
            used = one.get("energy") or {}
            print("   rival", one["name"], f"{one['measurement']['median_us']:.1f} us", f"{used['joules'] * 1e3:.2f} mJ {used['watts']:.0f} W" if used else "no energy")
P

on0=(env CUDA_VISIBLE_DEVICES="${cards[0]}" taskset -c "${halves[0]}" "$python")
on1=(env CUDA_VISIBLE_DEVICES="${cards[1]}" taskset -c "${halves[1]}" "$python")
small=(--shapes benchmarks/shapes/repeated.yaml)

chain0() {
  note "b0 begins"
  limited "${B_SECONDS:-215}" "${on0[@]}" benchmarks/exhaustive.py measure "$here/r/b0.jsonl" --shard 0/2 --count "${COUNT:-16}" > "$here/r/b0.txt" 2>&1
  note "b0 ended; c begins"
  limited "${C_SECONDS:-270}" "${on0[@]}" benchmarks/speed.py autotune --variants "${VARIANTS:-64}" > "$here/r/c.txt" 2>&1
  note "c ended"
}
chain1() {
  note "b1 begins"
  limited "${B_SECONDS:-215}" "${on1[@]}" benchmarks/exhaustive.py measure "$here/r/b1.jsonl" --shard 1/2 --count "${COUNT:-16}" > "$here/r/b1.txt" 2>&1
  note "b1 ended; e begins"
  limited 60 "${on1[@]}" -m autoattn tune --device auto --effort quick --objective energy --cache "$here/e" "${small[@]}" --group d64 > "$here/r/e.txt" 2>&1
  "$python" "$here/told.py" "$here/e" > "$here/r/e_table.txt" 2>&1
  note "e ended; d begins"
  limited "${D_SECONDS:-270}" "${on1[@]}" benchmarks/repeatability.py measured "${small[@]}" --group d64 --tunes "${TUNES:-20}" > "$here/r/d.txt" 2>&1
  note "d ended"
}
# Not among the usual parts: variants a second, on 16 cores and one card (ONLY=a, 3 minutes).
case " ${ONLY:-} " in *" a "*)
  note "a begins"
  limited "${A_SECONDS:-200}" "${on0[@]}" benchmarks/speed.py throughput --seconds 12 --problems 8 > "$here/r/a.txt" 2>&1
  note "a ended"; grep -vE "^$" "$here/r/a.txt" | cut -c1-250;;
esac
case " ${ONLY:-chain0 chain1 both} " in *" chain0 "*) chain0 & first=$!;; esac
case " ${ONLY:-chain0 chain1 both} " in *" chain1 "*) chain1 & second=$!;; esac
wait ${first:-} ${second:-}

# One study on two cards, after the same on one: compiled afresh each time, on all cores.
case " ${ONLY:-chain0 chain1 both} " in *" both "*)
  for workers in 2 1; do
    note "f begins, --workers $workers"
    ( while sleep 0.2; do nvidia-smi --query-gpu=index,utilization.gpu --format=csv,noheader; done > "$here/r/f_busy_$workers.txt" 2>/dev/null ) & watch=$!
    limited 50 env TRITON_CACHE_DIR="$here/f-triton-$workers" "$python" -m autoattn tune --device auto --effort quick --workers "$workers" --trials 32 --cache "$here/f$workers" "${small[@]}" > "$here/r/f$workers.txt" 2>&1
    kill "$watch" 2>/dev/null; wait "$watch" 2>/dev/null
    {
      echo "--workers $workers:"; grep -E "tried|tuned|trials" "$here/r/f$workers.txt"
      for card in "${cards[@]:0:2}"; do echo "card $card: seen busy in $(grep -cE "^$card, *[1-9]" "$here/r/f_busy_$workers.txt") of $(grep -c "^$card," "$here/r/f_busy_$workers.txt") looks"; done
      "$python" "$here/told.py" "$here/f$workers" | grep -v "^ "
    } >> "$here/r/f_table.txt" 2>&1
  done;;
esac
"$python" -m autoattn report --cache "$here/e" --out "$here/r/e_report" >> "$here/r/e.txt" 2>&1
"$python" benchmarks/exhaustive.py table "$here"/r/b*.jsonl > "$here/r/b_table.md" 2>&1
mkdir -p "$here/r/e_cache"; cp -r "$here/e/." "$here/r/e_cache/" 2>/dev/null
note "all ended"
