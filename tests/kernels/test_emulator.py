"""The emulator of CUDA kernels: each primitive against its definition, each mistake against its report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from emulator import COMPILER, EmulatorError, emulate
from waiting import PATIENCE_S

SOURCE = Path(__file__).parent / "emulator" / "checks.cu"
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
KERNELS = [
    *(f"{kernel}<{dtype}>" for kernel in ("convert", "product") for dtype in TYPES),
    *(
        f"{kernel}<{choice}>"
        for kernel in ("matrices", "reverse", "refill", "neighbours")
        for choice in ("false", "true")
    ),
    *("copy<0, true>", "copy<1, true>", "copy<0, false>"),
    *("exchange<0>", "exchange<1>", "exchange<2>"),
    *("exponential", "copy_at", "half_barrier", "half_product", "arrive_twice", "access"),
    *("misaligned", "outside_of_array", "large_stack", "from_l2"),
    *(f"meeting<{mistake}>" for mistake in range(5)),
    *(
        f"warpgroups<{dtype}, {columns}, {summed}>"
        for dtype in TYPES
        for columns in (64, 128)
        for summed in ("false", "true")
    ),
    *("forever", "indices", "warp_functions", "numbers", "large_floats"),
]
SEEDS = range(8)

pytestmark = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")


def run(
    kernel: str,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    *args: object,
    shared_bytes: int = 0,
    cluster: int = 1,
    cooperative: bool = False,
    seed: int = 0,
    timeout_s: float = PATIENCE_S,
) -> None:
    emulate(
        SOURCE,
        kernel,
        grid,
        block,
        args,
        shared_bytes=shared_bytes,
        cluster=cluster,
        cooperative=cooperative,
        seed=seed,
        together=KERNELS,
        timeout_s=timeout_s,
    )


@pytest.mark.parametrize("name", TYPES)
def test_conversions_agree_with_torch(name: str) -> None:
    dtype = TYPES[name]
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (65536,), generator=generator, dtype=torch.int64)
    values = bits.to(torch.int32).view(torch.float32).clone()
    values[:20000] = torch.randn(20000, generator=generator) * 1e-6
    values[20000:40000] = (
        every[10000:30000].float() + every[10001:30001].float()
    )  # ties, once halved
    values[20000:40000] /= 2
    values = values.nan_to_num(nan=0.5)
    widened, narrowed = torch.zeros(65536), torch.zeros(65536, dtype=dtype)
    packed = torch.zeros(65536, dtype=torch.int32)
    run(f"convert<{name}>", 4, 64, every, widened, values, narrowed, packed, 65536)
    torch.testing.assert_close(widened, every.float(), rtol=0, atol=0, equal_nan=True)
    expected = values.to(dtype).view(torch.int16)
    assert torch.equal(narrowed.view(torch.int16), expected)
    low = expected.to(torch.int32) & 0xFFFF
    assert torch.equal(packed, low | low.flip(0) << 16)


def test_exp2_is_close_and_flushes_subnormals() -> None:
    values = torch.cat([torch.linspace(-125, 127, 29), torch.tensor([-130.0, -INF, INF])])
    out = torch.zeros(32)
    run("exponential", 1, 32, values, out)
    expected = torch.exp2(values)
    expected[29] = 0
    torch.testing.assert_close(out, expected, rtol=2**-21, atol=0)


INF = float("inf")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("seed", [0, 2])
def test_ldmatrix_agrees_with_the_table_of_the_ptx_isa(transposed: bool, seed: int) -> None:
    elements = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)  # matrix, row, column
    out = np.zeros((32, 4, 2), np.uint16)
    run(
        f"matrices<{str(transposed).lower()}>", 1, 32, elements, out, 0, shared_bytes=512, seed=seed
    )
    shown = elements.swapaxes(1, 2) if transposed else elements
    expected = shown.reshape(4, 8, 4, 2)  # matrix, row, thread of the row, element
    assert np.array_equal(out, expected.transpose(1, 2, 0, 3).reshape(32, 4, 2))


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_mma_is_a_product_with_fp32_sums(name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(16, 16, generator=generator).to(TYPES[name])
    b = torch.randn(16, 8, generator=generator).to(TYPES[name])
    c = torch.randn(16, 8, generator=generator)
    expected = (a.double() @ b.double() + c.double()).float()
    run(f"product<{name}>", 1, 32, a, b, c, shared_bytes=768, seed=seed)
    torch.testing.assert_close(c, expected, rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("summed", [False, True])
def test_wgmma_is_a_product_with_fp32_sums(name: str, columns: int, summed: bool) -> None:
    generator = torch.Generator().manual_seed(columns)
    a = torch.randn(128, 64, generator=generator).to(TYPES[name])
    b = torch.randn((64, columns) if summed else (columns, 64), generator=generator).to(TYPES[name])
    c = torch.randn(128, columns, generator=generator)
    expected = a.double() @ (b if summed else b.T).double() + c.double()
    kernel = f"warpgroups<{name}, {columns}, {str(summed).lower()}>"
    run(kernel, 1, 256, a, b, c, 0, 0, shared_bytes=32768, seed=1)
    torch.testing.assert_close(c.double(), expected, rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize(
    ("shifts", "message"),
    [
        (
            (8, 0),
            r"checks.cu:\d+: .*wgmma_operand: shared address at byte 8 is not a multiple of 16",
        ),
        ((0, 16384), r"wgmma_operand: .* byte 32768, outside of the 32768 bytes of shared memory"),
        ((0, 8192), r"wgmma: byte 3\d{4} of 32768 bytes of shared memory"),
    ],
)
def test_a_misplaced_operand_of_wgmma_is_named(shifts: tuple[int, int], message: str) -> None:
    a, b = (torch.zeros(size, 64, dtype=torch.float16) for size in (128, 128))
    with pytest.raises(EmulatorError, match=message):
        args = [a, b, torch.zeros(128, 128), *shifts]
        run("warpgroups<fp16, 128, false>", 1, 256, *args, shared_bytes=32768)


@pytest.mark.parametrize(
    ("kernel", "shown"),
    [
        ("copy<0, true>", (True, True)),
        ("copy<1, true>", (True, False)),
        ("copy<0, false>", (False,) * 2),
    ],
)
def test_a_copy_is_visible_only_after_the_wait_for_its_group(
    kernel: str, shown: tuple[bool, bool]
) -> None:
    first, second = torch.randn(32, 4), torch.randn(32, 4)
    out = torch.zeros(2, 32, 4)
    run(kernel, 1, 32, first, second, out, 20, shared_bytes=1024)
    second[20:] = 0
    for part, expected, there in zip(out, (first, second), shown, strict=True):
        assert torch.equal(part, expected) if there else part.isnan().all()


@pytest.mark.parametrize("kernel", ["reverse", "refill", "neighbours"])
def test_a_missing_barrier_is_detected_for_some_seed(kernel: str) -> None:
    threads = 32 if kernel == "neighbours" else 128
    args = [torch.arange(128.0)] if kernel == "reverse" else []

    def result(choice: str, seed: int) -> torch.Tensor:
        out = torch.zeros(threads)
        run(f"{kernel}<{choice}>", 1, threads, *args, out, shared_bytes=512, seed=seed)
        return out

    expected = {
        "reverse": torch.arange(128.0).flip(0),
        "refill": torch.full((128,), 123.0),
        "neighbours": torch.arange(32.0)[torch.arange(32) ^ 5],
    }[kernel]
    assert all(torch.equal(result("true", seed), expected) for seed in SEEDS)
    wrong = [seed for seed in SEEDS if not torch.equal(result("false", seed), expected)]
    assert wrong
    torch.testing.assert_close(
        result("false", wrong[0]), result("false", wrong[0]), rtol=0, atol=0, equal_nan=True
    )


def test_blocks_of_a_cluster_see_each_other() -> None:
    for seed in SEEDS:
        out = torch.zeros(8, 64)
        run("exchange<0>", 8, 64, out, shared_bytes=256, cluster=4, seed=seed)
        blocks = torch.tensor([1, 2, 3, 0, 5, 6, 7, 4])
        assert torch.equal(out, 1000.0 * blocks[:, None] + torch.arange(64))


def meet(mistake: int, blocks: int, seed: int, counter: int = 0) -> tuple[torch.Tensor, int]:
    """Return what the blocks received, and the counter after three barriers."""
    out, word = torch.zeros(blocks, 64), torch.tensor([counter], dtype=torch.int32)
    args = [torch.zeros(blocks), out, word]
    run(f"meeting<{mistake}>", blocks, 64, *args, cluster=blocks, cooperative=True, seed=seed)
    return out, int(word)


PHASE = -(2**31)


@pytest.mark.parametrize("counter", [0, PHASE])
def test_blocks_of_a_cooperative_launch_wait_for_each_other(counter: int) -> None:
    for seed in SEEDS:
        out, left = meet(0, 20, seed, counter)
        assert torch.equal(out, torch.full((20, 64), 2.0 * 190 + 2000)), seed
        assert left == (
            PHASE if counter == 0 else 0
        )  # the phase changed three times, and no block is counted


def test_a_missing_gpu_wait_is_detected_for_some_seed() -> None:
    wrong = [seed for seed in SEEDS if not torch.equal(meet(0, 4, 0)[0], meet(3, 4, seed)[0])]
    assert wrong


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (1, r"checks.cu:\d+: thread 0 .*gpu_wait: some block never arrives, or two are the first"),
        (4, r"gpu_arrive of 5 blocks in a cluster of 4"),
    ],
)
def test_a_wrong_barrier_of_a_cooperative_launch_is_named(mistake: int, message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        meet(mistake, 4, 1)


def test_two_first_blocks_of_a_barrier_leave_it_counting() -> None:
    assert meet(0, 4, 1)[1] & ~PHASE == 0
    assert meet(2, 4, 1)[1] & ~PHASE != 0


def test_loads_from_l2_are_complete() -> None:
    out = torch.zeros(7)
    run("from_l2", 1, 1, torch.arange(7.0) + 1, out)
    assert torch.equal(out, torch.arange(7.0) + 1)


def test_a_missing_wait_for_the_cluster_is_detected_for_some_seed() -> None:
    def wrong(seed: int) -> bool:
        out = torch.zeros(8, 64)
        run("exchange<1>", 8, 64, out, shared_bytes=256, cluster=4, seed=seed)
        return bool(out.isnan().any())

    assert any(wrong(seed) for seed in SEEDS)


def test_the_shared_memory_of_an_ended_block_is_inaccessible() -> None:
    def said(seed: int) -> str:
        try:
            run("exchange<2>", 8, 64, torch.zeros(8, 64), shared_bytes=256, cluster=4, seed=seed)
        except EmulatorError as error:
            return str(error)
        return ""

    messages = [said(seed) for seed in SEEDS]
    assert any("that block has ended" in message for message in messages), messages


ONE_ROW = torch.zeros(64, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("kernel", "block", "args", "message"),
    [
        ("half_barrier", 96, [], r"0 to 39 wait in block_sync at checks.cu:\d+\n.*95 have ended"),
        (
            "half_product",
            32,
            [torch.zeros(32)],
            r"15 wait in mma16816 at .*\n.*31 wait in block_sy",
        ),
        ("arrive_twice", 32, [], r"thread \d+ of block \(0, 0, 0\): a second cluster_arrive"),
        ("copy_at", 1, [ONE_ROW, 8, 0], r"checks.cu:\d+: thread 0.*byte 8 is not a multiple of 16"),
        ("copy_at", 1, [ONE_ROW, 512, 0], r"byte 512, outside of the 512 bytes of shared memory"),
        ("copy_at", 1, [ONE_ROW, -16, 0], r"byte -16, outside of the 512 bytes"),
        ("copy_at", 1, [ONE_ROW, 0, 8], r"the global address is not a multiple of 16"),
        (
            "copy_at",
            1,
            [ONE_ROW, 0, 64],
            r"outside of all tensors, 16 bytes past the end of arg.* 0",
        ),
        ("copy_at", 1, [ONE_ROW[:32], 0, 32], r"outside of all tensors, 16 bytes past the end"),
        (
            "matrices<false>",
            32,
            [torch.zeros(32, 4), torch.zeros(128), 8],
            r"ldmatrix4: .*multiple",
        ),
        ("matrices<true>", 32, [torch.zeros(32, 4), torch.zeros(128), 16], r"trans: .* outside of"),
        ("misaligned", 1, [torch.zeros(64), torch.zeros(1), 2], r"checks.cu:\d+: .*not aligned"),
        (
            "outside_of_array",
            1,
            [torch.zeros(64), 5],
            r"checks.cu:\d+: .*index outside of its array",
        ),
        ("large_stack", 64, [torch.zeros(64)], r"too many local variables"),
        ("access", 32, [torch.zeros(64), 64, 0, 0], None),
        (
            "access",
            32,
            [torch.zeros(64), 1 << 10, 0, 0],
            r"checks.cu:\d+: thread 3 .*: byte 4096 of",
        ),
        ("access", 32, [torch.zeros(64), 0, -1, 0], r"wrote outside of argument 0"),
        ("access", 32, [torch.zeros(60), 0, 60, 0], r"wrote outside of argument 0"),
        ("access", 32, [torch.zeros(64), 0, 0, 128], r"wrote outside of its shared memory"),
        ("access", 32, [torch.zeros(64), 0, 0, 256], r"byte 1024 of the shared memory of block 0"),
    ],
)
def test_mistakes_are_named(
    kernel: str, block: int, args: list[object], message: str | None
) -> None:
    if message is None:
        message = r"byte 256 of the tensor of argument 0, which has 256 bytes"
    with pytest.raises(EmulatorError, match=message):
        run(kernel, 1, block, *args, shared_bytes=512)


def test_a_kernel_that_does_not_end_is_stopped() -> None:
    with pytest.raises(EmulatorError, match="still running after 1 s"):
        run("forever", 1, 32, torch.zeros(1, dtype=torch.int32), timeout_s=1)


@pytest.mark.parametrize("seed", [0, 3])
def test_every_thread_of_a_grid_runs_once(seed: int) -> None:
    out = torch.zeros(24, 60, dtype=torch.int32)
    run("indices", (4, 3, 2), (5, 4, 3), out, seed=seed)
    blocks = torch.arange(24, dtype=torch.int32)[:, None]
    assert torch.equal(out, 1 + 1000 * blocks + torch.arange(60, dtype=torch.int32))


def test_warp_functions() -> None:
    values = torch.randn(32, dtype=torch.float64).mul(8).round().float()
    out = torch.zeros(5, 32)
    run("warp_functions", 1, 32, values, out, seed=1)
    lanes = torch.arange(32)
    assert torch.equal(out[0], values.sum().expand(32))
    assert torch.equal(out[1], values[lanes // 8 * 8 + (lanes + 3) % 8])
    assert torch.equal(out[2], values[lanes ^ 1])
    assert torch.equal(out[3], values[torch.where(lanes + 4 < 32, lanes + 4, lanes)])
    assert out[4, 0] == sum(1 << lane for lane in range(0, 32, 3)) >> 8


def test_numbers_and_slices_of_tensors_are_passed() -> None:
    whole = torch.zeros(3, 5)
    run("numbers", 1, 1, whole[1], 7, 1.5, np.int64(1 << 40), np.float64(0.25), np.bool_(True))
    assert whole.tolist() == [[0.0] * 5, [7, 1.5, float(1 << 40), 0.25, 1], [0.0] * 5]
    array = np.array([-5.0, 4.0], np.float32)
    run("large_floats", 1, 1, array)
    assert array[0] == -5 + 2 + 1 + 4 + 8
    with pytest.raises(EmulatorError, match=r"checks.cu:\d+: thread 0 .* belongs to no tensor"):
        run("large_floats", 1, 1, None)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([torch.zeros(5), 7], "2 arguments; the kernel takes 6"),
        ([1, 1, 1.0, np.int64(1), np.float64(1), np.bool_(1)], "argument 0: .* takes a pointer"),
        ([torch.zeros(5), 1, 1.0, 1, np.float64(1), np.bool_(1)], "argument 3: a number of 4 byte"),
        ([torch.zeros(5).double(), 1, 1.0, np.int64(1), 1.0, True], "argument 0: a tensor of 8 by"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(args: list[object], message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        run("numbers", 1, 1, *args)


def test_an_impossible_launch_is_refused() -> None:
    with pytest.raises(EmulatorError, match="at most 1024 threads"):
        run("half_barrier", 1, 1056)
    with pytest.raises(EmulatorError, match="no multiple of the cluster"):
        run("half_barrier", 3, 32, cluster=2)
    with pytest.raises(EmulatorError, match="at most 232448"):
        run("half_barrier", 1, 32, shared_bytes=240_000)
