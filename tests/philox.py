"""Philox4x32-10 in plain Python: J. K. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011."""

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def philox4x32_10(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """The four 32-bit words of a counter under a key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low, high = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & _MASK, (low >> 32) ^ c3 ^ k1, low & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def word_of(index: int, seed: int, offset: int, threads: int) -> int:
    """The word of element ``index`` of a stock CUDA fill of 32-bit values, with ``threads`` threads a launch, whose
    generator has ``seed`` and ``offset``: a thread is a subsequence, and takes the four words of a call in turn."""
    call, lane = offset // 4 + index // (threads * 4), index // threads % 4
    counter = call & _MASK, call >> 32, index % threads, 0
    return philox4x32_10(counter, (seed & _MASK, seed >> 32))[lane]
