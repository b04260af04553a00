# What tuner.sh and models.sh share: a folder of their own, two cards, the first two of CUDA_VISIBLE_DEVICES where that is
# set, and commands that end in time. They source it and set before:
# name; all, seconds of everything; least, seconds below which no command begins; grace, seconds after Ctrl-C.
python=${PYTHON:-python3}
here=$(mktemp -d "/tmp/$name-check-XXXXXX")
result=${OUT:-/tmp/$name-out}
mkdir -p "$result" "$here/r"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TRITON_CACHE_DIR="$here/triton" AUTOATTN_CACHE="$here/autoattn"
IFS=, read -ra cards <<< "${CUDA_VISIBLE_DEVICES:-0,1}"
export CUDA_VISIBLE_DEVICES="${cards[0]},${cards[1]}"

left() { echo $((all - SECONDS)); }
# limited SECONDS COMMAND...: at most so long, and not past the end of all; Ctrl-C first, so that it tells what it has.
limited() {
  local most=$1 rest; shift
  rest=$(left); [ "$most" -gt "$rest" ] && most=$rest
  [ "$most" -lt "$least" ] && { echo "no time left for: $*"; return 1; }
  timeout -s INT -k "$grace" "$most" "$@"
  local code=$?
  [ $code -ne 0 ] && echo "ended with $code (124 or 130: its $most s were over): $*"
  return $code
}
note() { printf '%4d s  %s\n' "$SECONDS" "$*" | tee -a "$here/r/times.txt"; }
