"""Bad input: a clear error, the whole text pinned, and nothing moved."""

from types import SimpleNamespace

import expecttest
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard, empty
from worlds import as_rank

import torch_dtensor_rng as tdr
from torch_dtensor_rng import _dispatch, _torch_names

aten = torch.ops.aten


class Case(expecttest.TestCase):
    def setUp(self) -> None:
        self.mesh = as_rank(1, (4,), names=("dp",))
        self.addCleanup(dist.destroy_process_group)
        installation = tdr.install()
        self.addCleanup(installation.uninstall)
        torch.manual_seed(0)
        self.before = torch.get_rng_state()

    def check(self, error: type[BaseException], text: str, call, *args, **kwargs) -> None:
        with self.assertRaises(error) as raised:
            call(*args, **kwargs)
        self.assertExpectedInline(str(raised.exception), text, skip=1)
        self.assertTrue(torch.equal(torch.get_rng_state(), self.before))


class TestErrors(Case):
    def test_generator_of_another_device(self):
        x = empty(16, 6, device_mesh=self.mesh, placements=[Shard(0)])
        op = torch.ops.aten.uniform_.default
        wrong = {"generator": SimpleNamespace(device=torch.device("cuda:1"))}  # a real one needs a CUDA build
        text = """Expected a 'cpu' device type for generator but found 'cuda': the local tensor of the DTensor is on cpu, the generator on cuda:1."""
        self.check(RuntimeError, text, _dispatch.HANDLERS[op], op, (x,), wrong)
        x.uniform_()  # from here on the spec is known
        torch.manual_seed(0)
        self.check(RuntimeError, text, _dispatch.HANDLERS[op], op, (x,), wrong)

    def test_draw_into_partial(self):
        x = empty(16, 6, device_mesh=self.mesh, placements=[Partial()]).fill_(7)
        self.check(
            RuntimeError,
            """aten.normal_.default: cannot draw in place into a DTensor with a Partial placement, found (Partial(sum),): its ranks hold terms of a reduction, not values. Redistribute it to Replicate or Shard first.""",
            x.normal_,
        )
        self.assertTrue(bool((x.to_local() == 7).all()))

    def test_factory_with_partial(self):
        self.check(
            RuntimeError,
            """aten.uniform_.default: cannot draw in place into a DTensor with a Partial placement, found (Partial(sum),): its ranks hold terms of a reduction, not values. Redistribute it to Replicate or Shard first.""",
            tdr.rand,
            4,
            device_mesh=self.mesh,
            placements=[Partial()],
        )

    def test_factory_with_a_generator_of_another_kind(self):
        self.check(
            TypeError,
            """argument 'generator' must be a torch.Generator, not int""",
            tdr.rand,
            4,
            device_mesh=self.mesh,
            generator=3,
        )

    def test_integers_that_require_grad(self):
        self.check(
            RuntimeError,
            """Only Tensors of floating point and complex dtype can require gradients""",
            tdr.randint,
            5,
            (16,),
            device_mesh=self.mesh,
            placements=[Shard(0)],
            requires_grad=True,
        )

    def test_unknown_policy(self):
        self.check(
            ValueError,
            """install expects policy to be one of 'offset', 'single_device', found 'ofset'""",
            tdr.install,
            "ofset",
        )

    def test_unknown_mesh_dim(self):
        self.check(
            ValueError,
            """manual_seed expects distinct_dims among the dims of device_mesh, found 'pp' and a device_mesh with dims ('dp',)""",
            tdr.manual_seed,
            3,
            self.mesh,
            distinct_dims=("dp", "pp"),
        )
        self.check(
            ValueError,
            """manual_seed expects distinct_dims among the dims of device_mesh, found 'pp' and no device_mesh""",
            tdr.manual_seed,
            3,
            distinct_dims=("pp",),
        )

    def test_seed_out_of_range(self):
        self.check(ValueError, """manual_seed expects seed in [0, 2**64), found -1""", tdr.manual_seed, -1)
        self.check(
            ValueError,
            """manual_seed expects seed in [0, 2**64), found 18446744073709551616""",
            tdr.manual_seed,
            1 << 64,
        )
        self.check(TypeError, """'float' object cannot be interpreted as an integer""", tdr.manual_seed, 1.5)

    def test_seeding_a_rank_outside_the_mesh(self):
        from torch.distributed.device_mesh import DeviceMesh

        other = DeviceMesh("cpu", [0, 2])
        self.check(
            RuntimeError,
            """manual_seed requires the current rank to be a part of the device mesh""",
            tdr.manual_seed,
            3,
            other,
        )

    def test_randint_without_size(self):
        self.check(
            TypeError,
            """randint(): argument 'size' must be a sequence of ints, not NoneType""",
            tdr.randint,
            3,
            device_mesh=self.mesh,
        )
        self.check(
            RuntimeError,
            """random_ expects 'from' to be less than 'to', but got from=5 >= to=3""",
            tdr.randint,
            5,
            3,
            (16,),
            device_mesh=self.mesh,
            placements=[Shard(0)],
        )

    def test_uninstalling_what_is_not_installed(self):
        tdr.uninstall()
        self.check(RuntimeError, """torch_dtensor_rng is not installed""", tdr.uninstall)

    def test_uninstalling_in_the_wrong_order(self):
        outer = tdr.install()
        inner = tdr.install()
        self.check(
            RuntimeError,
            """installations are taken out in reverse order, and a later one is still in""",
            outer.uninstall,
        )
        inner.uninstall()
        outer.uninstall()

    def test_a_private_name_that_moved(self):
        absent = _torch_names.missing(("torch.distributed.tensor:DTensor._gone.away", "torch.gone:name", "torch:rand"))
        self.assertExpectedInline(str(absent), """['torch.distributed.tensor:DTensor._gone.away', 'torch.gone:name']""")
        with self.assertRaises(ImportError) as raised:
            _torch_names.check(("torch:_gone", "torch:rand"))
        self.assertExpectedInline(
            str(raised.exception).replace(torch.__version__, "X"),
            """torch_dtensor_rng supports torch 2.11 to 2.15; torch X has no torch:_gone.""",
        )


@pytest.mark.parametrize("names", [_torch_names.PRIVATE_NAMES, _torch_names.DYNAMO_NAMES], ids=["torch", "dynamo"])
def test_every_private_name_is_where_it_was(names):
    assert _torch_names.missing(names) == []


class TestRefusals(Case):
    def x(self, *placements):
        return empty(16, 6, device_mesh=self.mesh, placements=placements or [Shard(0)]).fill_(0.5)

    def test_out(self):
        self.check(
            NotImplementedError,
            """aten.bernoulli.out: this op is not supported on DTensors; call it without out=, and copy_() what it returns into the tensor.""",
            lambda: torch.bernoulli(self.x(), out=self.x()),
        )

    def test_factory_with_out(self):
        self.check(
            NotImplementedError,
            """aten.rand.out: this op is not supported on DTensors; fill the tensor in place with uniform_(), normal_() or random_(), or draw it anew with torch_dtensor_rng's rand().""",
            lambda: torch.rand(16, 6, out=self.x()),
        )

    def test_factory_with_out_that_torch_decomposes(self):
        for fn in (
            lambda: torch.randn(16, 6, out=self.x()),
            lambda: torch.rand(16, 6, generator=torch.Generator(), out=self.x()),
        ):
            self.check(
                NotImplementedError,
                """aten.resize_.default: this op is not supported on DTensors; if it comes from out= of torch.rand() or torch.randn(), fill the tensor in place with uniform_(), normal_() or random_(), or draw it anew with torch_dtensor_rng's rand() or randn().""",
                fn,
            )

    def test_every_public_out_is_refused(self):
        x = self.x()
        for fn in (
            lambda: torch.bernoulli(x, out=x),
            lambda: torch.multinomial(x, 1, out=x),
            lambda: torch.normal(x, x, out=x),
            lambda: torch.normal(x, 1.0, out=x),
            lambda: torch.normal(1.0, x, out=x),
            lambda: torch.normal(0.0, 1.0, (16, 6), out=x),
            lambda: torch.rand(16, 6, out=x),
            lambda: torch.randn(16, 6, generator=torch.Generator(), out=x),
            lambda: torch.randint(4, (16, 6), out=x),
            lambda: torch.randint(2, 4, (16, 6), out=x),
            lambda: torch.randperm(16, out=x),
        ):
            before = torch.get_rng_state()
            with self.assertRaisesRegex(NotImplementedError, "^aten.*: this op is not supported on DTensors; "):
                fn()
            self.assertTrue(torch.equal(before, torch.get_rng_state()))

    def test_attention_on_the_cpu(self):
        q = empty(4, 2, 8, 8, device_mesh=self.mesh, placements=[Shard(0)]).fill_(1)
        self.check(
            NotImplementedError,
            """aten._scaled_dot_product_flash_attention_for_cpu.default: this op is not supported on DTensors; choose the math path: with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH).""",
            lambda: aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.5),
        )

    def test_noise_that_is_laid_out_otherwise(self):
        self.check(
            RuntimeError,
            """aten.rrelu_with_noise.default: argument 'noise' is written, and so has to be laid out like the first one, of shape (16, 6) and placements (Shard(dim=0),), found (16, 6) and (Replicate(),). Redistribute the input to Replicate or Shard before the call, if it has a Partial placement.""",
            lambda: aten.rrelu_with_noise(self.x(), self.x(Replicate()), 0.1, 0.3, True),
        )

    def test_noise_for_a_partial_input(self):
        self.check(
            RuntimeError,
            """aten.rrelu_with_noise.default: argument 'noise' is written, and so has to be laid out like the first one, of shape (16, 6) and placements (Replicate(),), found (16, 6) and (Partial(sum),). Redistribute the input to Replicate or Shard before the call, if it has a Partial placement.""",
            lambda: torch.rrelu(self.x(Partial()), 0.1, 0.3, True),
        )

    def test_in_place_into_partial(self):
        self.check(
            RuntimeError,
            """aten.bernoulli_.Tensor: cannot draw in place into a DTensor with a Partial placement, found (Partial(sum),): its ranks hold terms of a reduction, not values. Redistribute it to Replicate or Shard first.""",
            lambda: self.x(Partial()).bernoulli_(self.x()),
        )

    def test_randperm_with_partial(self):
        self.check(
            RuntimeError,
            """randperm: cannot draw in place into a DTensor with a Partial placement, found (Partial(sum),): its ranks hold terms of a reduction, not values. Redistribute it to Replicate or Shard first.""",
            lambda: tdr.randperm(4, device_mesh=self.mesh, placements=[Partial()]),
        )

    def test_mixed(self):
        for fn, name in (
            (lambda: torch.normal(self.x(), torch.ones(16, 6)), "normal.Tensor_Tensor"),
            (lambda: torch.normal(torch.ones(16, 6), self.x()), "normal.Tensor_Tensor"),
            (lambda: torch.binomial(torch.ones(16, 6), self.x()), "binomial.default"),
            (lambda: torch.binomial(self.x(), torch.ones(16, 6)), "binomial.default"),
            (lambda: self.x().bernoulli_(torch.ones(16, 6)), "bernoulli_.Tensor"),
            (lambda: torch.randint_like(torch.ones(16, 6), self.x().sum()), "randint_like.Tensor"),
            (lambda: torch.empty(16, 6).bernoulli_(self.x()), "bernoulli_.Tensor"),
        ):
            before = torch.get_rng_state()
            with self.assertRaisesRegex(RuntimeError, f"aten.{name}:? got mixed torch.Tensor and DTensor"):
                fn()
            self.assertTrue(torch.equal(before, torch.get_rng_state()))
