"""Zeros of a step, from one block."""

import threading

import torch
from millrace_kernels.scratch import ALIGN, Scratch, zeros
from torch import Tensor

META, CPU = torch.device("meta"), torch.device("cpu")


def dirty(words: int) -> Scratch:
    block = Scratch(CPU, words)
    block._memory.fill_(7)
    return block


def test_every_taker_gets_zeros_of_its_own() -> None:
    block = dirty(4 * ALIGN)
    for _ in range(2):
        with block.step():
            first, second = zeros(3, CPU), zeros(ALIGN + 1, CPU)
        assert first.tolist() == [0] * 3 and second.tolist() == [0] * (ALIGN + 1)
        first += 1
        second += 2
        assert int(first.sum()) == 3 and int(second.sum()) == 2 * (ALIGN + 1)


def test_replay_finds_them_where_they_were() -> None:
    block = dirty(4 * ALIGN)

    def places() -> list[int]:
        with block.step():
            return [zeros(words, CPU).data_ptr() for words in (5, 9)]

    assert places() == places()


def test_what_is_used_up_comes_from_torch() -> None:
    block = dirty(2 * ALIGN)
    with block.step():
        taken: list[Tensor] = [zeros(ALIGN, CPU) for _ in range(4)]
    assert all(part.tolist() == [0] * ALIGN for part in taken)
    assert [inside(block, part) for part in taken] == [True, True, False, False]


def test_step_ends() -> None:
    """What is captured alone must zero its own."""
    outer, block = dirty(4 * ALIGN), dirty(4 * ALIGN)
    with outer.step():
        with block.step():
            assert inside(block, zeros(1, CPU))
        assert inside(outer, zeros(1, CPU))
    assert not inside(outer, zeros(1, CPU))


def test_another_device_and_another_thread_have_their_own() -> None:
    block = dirty(4 * ALIGN)
    found: list[Tensor] = []
    with block.step():
        assert zeros(2, META).device == META and block._used == 0
        thread = threading.Thread(target=lambda: found.append(zeros(2, CPU)))
        thread.start()
        thread.join()
    assert found[0].tolist() == [0, 0] and block._used == 0


def inside(block: Scratch, part: Tensor) -> bool:
    start = block._memory.data_ptr()
    return start <= part.data_ptr() < start + block._memory.nbytes
