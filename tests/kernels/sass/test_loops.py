"""Which loops are taken for those over keys: the rule, on made-up code."""

from collections import Counter

from autoattn.kernels.sass import loops

PRODUCT, EXP, MASK, MAXIMUM = ["HMMA"] * 4, ["MUFU.EX2"] * 4, ["ISETP", "FSEL"] * 8, ["FMNMX"] * 16


class Program:
    """Writes instructions down; labels may be used before they are placed."""

    def __init__(self):
        self.lines, self.places = [], {}

    def __call__(self, *names):
        self.lines += [(name, None, True) for name in names]
        return self

    def label(self, name):
        self.places[name] = len(self.lines) * 16
        return self

    def branch(self, label, *, always=False):
        self.lines.append(("BRA", label, not always))
        return self

    def loop(self, *names):
        start = f"loop at {len(self.lines)}"
        return self.label(start)(*names).branch(start)

    def key_loops(self):
        code = [*((n, self.places.get(t, t), g) for n, t, g in self.lines), ("EXIT", None, False)]
        return tuple(Counter(loop) for loop in loops.over_keys(code))


def test_a_loop_around_the_key_loops_is_not_reported():
    program = Program().label("tile")(*MASK).loop(*PRODUCT, *EXP)(*MASK, "STG").branch("tile")
    plain, masked = program.key_loops()
    assert plain == Counter([*PRODUCT, *EXP, "BRA"])
    assert masked == Counter()


def test_the_order_of_the_loops_does_not_matter():
    plain, masked = Program().loop(*PRODUCT, *EXP, *MASK).loop(*PRODUCT, *EXP).key_loops()
    assert plain["FSEL"] == 0
    assert masked["FSEL"] == 8


def test_loops_without_both_a_product_and_an_exp2_are_not_reported():
    plain, masked = Program().loop(*PRODUCT).loop(*EXP).loop(*PRODUCT, *EXP, "FADD").key_loops()
    assert plain["FADD"] == 1
    assert masked == Counter()


def test_the_second_chance_of_the_first_maximum_is_left_out():
    first = Program().loop(*PRODUCT, *EXP, *MASK, "FADD")
    plain, masked = first.loop(*PRODUCT, *EXP, *MASK, *MASK, *MAXIMUM).key_loops()
    assert plain == Counter([*PRODUCT, *EXP, *MASK, "FADD", "BRA"])
    assert masked == Counter()


def test_a_mask_that_only_some_blocks_need_is_read_as_two_loops():
    program = Program().label("top")(*PRODUCT).branch("skip")(*MASK).label("skip")(*EXP).branch("top")
    plain, masked = program.key_loops()
    assert plain["FSEL"] == 0
    assert masked["FSEL"] == 8


def test_a_rescale_that_only_some_blocks_need_is_not_taken_for_a_mask():
    program = Program().label("top")(*PRODUCT).branch("skip")(*["FMUL"] * 50).label("skip")(*EXP).branch("top")
    plain, masked = program.key_loops()
    assert plain["FMUL"] == 0
    assert masked == Counter()


def test_a_wait_inside_a_loop_does_not_hide_it():
    program = Program().label("top")(*PRODUCT).label("wait")("SYNCS").branch("wait")(*EXP).branch("top")
    plain, _ = program.key_loops()
    assert plain["MUFU.EX2"] == 4
    assert plain["SYNCS"] == 1


def test_code_far_below_that_jumps_back_makes_no_loop():
    program = Program().branch("far").label("near").loop(*PRODUCT, *EXP)
    program.branch("end", always=True).label("far")("NOP").branch("near", always=True).label("end")
    plain, _ = program.key_loops()
    assert plain == Counter([*PRODUCT, *EXP, "BRA"])


def test_a_kernel_without_a_key_loop_is_reported_whole():
    plain, masked = Program()(*PRODUCT, *EXP).key_loops()
    assert plain == Counter([*PRODUCT, *EXP, "EXIT"])
    assert masked == Counter()
