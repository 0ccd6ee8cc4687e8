"""What all shards of a mesh draw together has the distribution it should have, and no two shards are correlated."""

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from test_semantics import placed, shard_key
from torch.distributed.tensor import DTensor, Shard, empty
from worlds import each_rank

LEAST_P = 1e-4
MOST_STANDARD_ERRORS = 5.0

LAYOUTS = {
    "two dims": ((2, 2), (Shard(0), Shard(1))),
    "one dim": ((8,), (Shard(0),)),
}


def kolmogorov_sf(x):
    """The chance that the limit of sqrt(n) * D, D the Kolmogorov-Smirnov statistic, is above ``x``."""
    k = torch.arange(1, 101, dtype=torch.float64)
    return (2 * (-1) ** (k + 1) * torch.exp(-2 * (k * x) ** 2)).sum().item()


def chi_square_sf(x, degrees):
    """The chance that a chi-square number is above ``x``."""
    return torch.special.gammaincc(*torch.tensor([degrees / 2, x / 2], dtype=torch.float64)).item()


def continuous(cdf: Callable[[torch.Tensor], torch.Tensor]):
    """The p-value of values that should have this distribution function, by a Kolmogorov-Smirnov test."""

    def p_value(values):
        below = cdf(values.sort().values)
        n = len(values)
        steps = torch.arange(n + 1, dtype=torch.float64) / n
        distance = torch.maximum((steps[1:] - below).max(), (below - steps[:-1]).max()).item()
        return kolmogorov_sf(math.sqrt(n) * distance)

    return p_value


def discrete(probabilities: torch.Tensor):
    """The p-value of values that should be 0, 1, ... with these probabilities, the last of which is that of all numbers
    from there on, by a chi-square test."""

    def p_value(values):
        last = len(probabilities) - 1
        counts = torch.bincount(values.long().clamp(max=last), minlength=last + 1).double()
        expected = probabilities * len(values)
        if counts[expected == 0].any() or not values.equal(values.round()):
            return 0.0
        # The approximation is poor in cells where few are expected, so these are one cell.
        rare = expected < 10
        counts, expected = (torch.cat([one[~rare], one[rare].sum(0, keepdim=True)]) for one in (counts, expected))
        possible = expected > 0
        cells = ((counts - expected) ** 2 / expected)[possible]
        return chi_square_sf(cells.sum().item(), len(cells) - 1)

    return p_value


def uniform(low, high):
    return continuous(lambda x: (x - low) / (high - low))


def normal(mean, std):
    return continuous(lambda x: torch.special.ndtr((x - mean) / std))


def log_normal(mean, std):
    return continuous(lambda x: torch.special.ndtr((x.log() - mean) / std))


def exponential(rate):
    return continuous(lambda x: -torch.expm1(-rate * x))


def cauchy(median, sigma):
    return continuous(lambda x: torch.atan((x - median) / sigma) / math.pi + 0.5)


def gamma_of_two():
    return continuous(lambda x: 1 - (1 + x) * torch.exp(-x))


def weights(*of_each):
    """Nothing but 0, 1, ..., by these weights."""
    of_each = torch.tensor([*of_each, 0.0], dtype=torch.float64)
    return discrete(of_each / of_each.sum())


def bernoulli(p):
    return weights(1 - p, p)


def integers(low, high):
    return weights(*[0.0] * low, *[1.0] * (high - low))


def geometric(p):
    k = torch.arange(1, 100, dtype=torch.float64)
    return discrete(torch.cat([torch.zeros(1), p * (1 - p) ** (k - 1), torch.tensor([(1 - p) ** 99])]))


def poisson(rate):
    k = torch.arange(100, dtype=torch.float64)
    of_each = torch.exp(k * math.log(rate) - rate - torch.lgamma(k + 1))
    return discrete(torch.cat([of_each, torch.special.gammainc(torch.tensor([100.0]), torch.tensor([rate]))]))


def binomial(count, p):
    return weights(*(math.comb(count, k) * p**k * (1 - p) ** (count - k) for k in range(count + 1)))


def ranks(shards):
    return shards.argsort(1).argsort(1).double()


class Case(NamedTuple):
    draw: Callable[[DTensor], DTensor]  # takes an empty DTensor
    p_value: Callable[[torch.Tensor], float]
    shape: tuple[int, int] = (1024, 1024)  # of the empty one
    scores: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.double  # what is correlated


CASES = {
    "uniform_": Case(lambda x: x.uniform_(-1, 3), uniform(-1, 3)),
    "normal_": Case(lambda x: x.normal_(1, 2), normal(1, 2)),
    "log_normal_": Case(lambda x: x.log_normal_(0.5, 0.7), log_normal(0.5, 0.7)),
    "exponential_": Case(lambda x: x.exponential_(1.5), exponential(1.5)),
    "cauchy_": Case(lambda x: x.cauchy_(1, 2), cauchy(1, 2), scores=ranks),  # it has no variance
    "rand_like": Case(torch.rand_like, uniform(0, 1)),
    "randn_like": Case(torch.randn_like, normal(0, 1)),
    "_standard_gamma": Case(lambda x: torch._standard_gamma(x.fill_(2.0)), gamma_of_two()),
    "normal_tensors": Case(lambda x: torch.normal(x.fill_(1.0), torch.full_like(x, 2.0)), normal(1, 2)),
    "bernoulli_": Case(lambda x: x.bernoulli_(0.3), bernoulli(0.3)),
    "bernoulli": Case(lambda x: torch.bernoulli(x.fill_(0.25)), bernoulli(0.25)),
    "geometric_": Case(lambda x: x.geometric_(0.2), geometric(0.2)),
    "random_to": Case(lambda x: x.random_(1000), integers(0, 1000)),
    "randint_like_low": Case(lambda x: torch.randint_like(x, 3, 100), integers(3, 100)),
    # Small rates and counts are drawn by another algorithm than large ones.
    "poisson": Case(lambda x: torch.poisson(x.fill_(3.0)), poisson(3.0)),
    "poisson, large": Case(lambda x: torch.poisson(x.fill_(30.0)), poisson(30.0)),
    "binomial": Case(lambda x: torch.binomial(x.fill_(10.0), torch.full_like(x, 0.25)), binomial(10, 0.25)),
    "binomial, large": Case(lambda x: torch.binomial(x.fill_(80.0), torch.full_like(x, 0.25)), binomial(80, 0.25)),
    "native_dropout": Case(lambda x: torch.native_dropout(x.fill_(1.0), 0.3, True)[1], bernoulli(0.7)),
    "multinomial_with": Case(
        lambda x: torch.multinomial(x.fill_(1.0).cumsum(1), 6, True), weights(*range(1, 9)), shape=(200_000, 8)
    ),
}


def draw_shards(draw, shape, mesh_shape, placements, device):
    """What the mesh draws, a row for each shard."""

    def on_rank(rank, mesh):
        torch.manual_seed(2026)
        out = draw(empty(shape, device_mesh=mesh, placements=placements))
        assert isinstance(out, DTensor) and out.placements == placements
        return shard_key(mesh, placements), out.to_local().flatten().cpu().double()

    shards = torch.stack([*dict(each_rank(mesh_shape, on_rank, device)).values()])
    assert shards.numel() >= 10**6
    return shards


def draw_case(name, layout, device):
    mesh_shape, placements = LAYOUTS[layout]
    return draw_shards(CASES[name].draw, CASES[name].shape, mesh_shape, placed(name, placements), device)


def standard_errors(scores):
    """The largest correlation between any two rows, in standard errors of the correlation of unrelated rows."""
    pairs = torch.corrcoef(scores)[(*torch.triu_indices(len(scores), len(scores), 1),)]
    return pairs.abs().max().item() * math.sqrt(scores.shape[1])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_all_shards_together_have_the_distribution(name, layout, device, installed):
    shards = draw_case(name, layout, device)
    assert CASES[name].p_value(shards.flatten()) > LEAST_P


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_no_two_shards_are_correlated(name, layout, device, installed):
    shards = draw_case(name, layout, device)
    assert standard_errors(CASES[name].scores(shards)) < MOST_STANDARD_ERRORS


# Not quite what the case draws.
WRONG = {
    "uniform_": uniform(-1, 3.02),
    "normal_": normal(1, 2.04),
    "log_normal_": log_normal(0.5, 0.72),
    "exponential_": exponential(1.53),
    "cauchy_": cauchy(1.03, 2),
    "_standard_gamma": exponential(0.5),
    "bernoulli_": bernoulli(0.304),
    "geometric_": geometric(0.203),
    "random_to": integers(0, 999),
    "randint_like_low": integers(2, 100),
    "poisson": poisson(3.02),
    "binomial, large": poisson(20.0),
    "native_dropout": bernoulli(0.3),
    "multinomial_with": weights(*range(1, 8), 8.1),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_p_value_sees_a_wrong_distribution(name, device, installed):
    assert WRONG[name](draw_case(name, "two dims", device).flatten()) < LEAST_P


@pytest.mark.parametrize("scores", [torch.Tensor.double, ranks])
@pytest.mark.parametrize("share", [1, 1 / 16])
def test_the_correlation_sees_equal_numbers(share, scores, device):
    def draw_alone(x):  # as torch without the package does on a CPU mesh, where every rank has the same seed
        local = x.to_local().uniform_()
        own = torch.Generator(device).manual_seed(x.device_mesh.get_rank())
        local[round(share * len(local)) :].uniform_(generator=own)
        return x

    shards = draw_shards(draw_alone, (1024, 1024), *LAYOUTS["two dims"], device)
    assert standard_errors(scores(shards)) > MOST_STANDARD_ERRORS


def test_p_values_of_known_statistics():
    """From tables of critical values."""
    for critical, p in ((1.2238, 0.1), (1.3581, 0.05), (1.6276, 0.01)):
        assert kolmogorov_sf(critical) == pytest.approx(p, rel=1e-3)
    for critical, degrees, p in ((3.8415, 1, 0.05), (18.307, 10, 0.05), (135.807, 100, 0.01)):
        assert chi_square_sf(critical, degrees) == pytest.approx(p, rel=1e-3)
