"""`zerokern plan`: from a model to a recommendation."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import foresight
import models
import pytest
import ranks
import torch
from oracle import sharded
from torch._C._profiler import _EventType

from zerokern import Buckets, Memory, Precision, cli
from zerokern.plan.advice import advise
from zerokern.plan.forecast import Forecast, Setting, Strategy, forecast
from zerokern.plan.ledger import Ledger, Peak
from zerokern.plan.machine import Machine
from zerokern.plan.rehearsal import Launch, Rehearsal, Trace, Wait, Work
from zerokern.plan.replay import replay
from zerokern.plan.workload import Workload, find, of_count

GIB = 2**30
SMALL = ["--params", "30e6", "--layers", "4", "--sequence", "64", "--recipe", "fp32"]

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "architectures": ["LlamaForCausalLM"],
}
T5 = {
    "model_type": "t5",
    "d_model": 64,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "d_kv": 16,
    "vocab_size": 320,
    "decoder_start_token_id": 0,
}
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 320,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
VIT = {
    "model_type": "vit",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}

MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x))
        return x

def with_loss():
    batch = torch.randn(8, 64)
    return Net(), lambda model: model(batch).square().mean()

def needs(path):
    return Net()

def lazy():
    return nn.LazyLinear(3)

def reads():
    return nn.Linear(3, len(open("no such file").read()))

def other():
    return 7

number = 7
"""


def planned(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Return what the command says as JSON."""
    assert cli.main(["plan", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def complaint(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what the command says instead of planning."""
    try:
        assert cli.main(["plan", *arguments]) == 2
    except SystemExit as exit_:
        assert exit_.code == 2
    return capfd.readouterr().err


# ---------------------------------------------------------------------- what is planned


@pytest.mark.parametrize(
    ("config", "per"),
    [
        pytest.param(LLAMA, "tokens", id="llama"),
        pytest.param(T5, "tokens", id="t5", marks=pytest.mark.long),
        pytest.param(VIT, "samples", id="vit"),
        pytest.param(MIXTRAL, "tokens", id="mixtral"),
    ],
)
def test_a_configuration_of_transformers(
    config: dict[str, Any], per: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    found = planned(
        capfd, str(path), "--gpus", "4", "--sequence", "16", "--recipe", "fp32"
    )
    assert [strategy["stage"] for strategy in found["strategies"]] == [1, 2, 3] and all(
        strategy["fits"] for strategy in found["strategies"]
    )
    assert find(str(path), batch=1, sequence=16, dtype=torch.float32).per == per


def test_model_flops_are_those_of_matrix_products_and_attention(tmp_path: Path) -> None:
    """6 FLOPs per token and parameter that it meets, experts that it does not meet left
    out; attention on top."""
    path, tokens, width, layers = tmp_path / "config.json", 16, 64, 3
    for config, unused in ((LLAMA, 0), (MIXTRAL, layers * 2 * 3 * 64 * 128)):
        path.write_text(json.dumps(config))
        with Rehearsal(1) as rehearsal:
            model, loss = find(
                str(path), batch=1, sequence=tokens, dtype=torch.bfloat16
            ).build()
            assert loss is not None
            rehearsal.record()
            loss(model).backward()
            found = rehearsal.record().flops()
            met = (
                sum(
                    p.numel()
                    for name, p in model.named_parameters()
                    if p.dim() > 1 and "embed" not in name
                )
                - unused
            )
        # Two products forward, five backward.
        attention = layers * 2 * tokens * tokens * width * (2 + 5)
        assert found == 6 * tokens * met + attention, config["model_type"]


def test_a_forward_that_fails_is_a_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Torch's grouped products have shapes in bf16 only.
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    said = complaint(
        capfd, str(tmp_path / "config.json"), "--dtype", "fp32", "--sequence", "16"
    )
    assert (
        said.count("\n") == 1
        and "the forward pass fails on tensors without values" in said
        and "--dtype" in said
    )


def test_an_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "planned_models.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    found = planned(
        capfd,
        "planned_models:with_loss",
        "--gpus",
        "4",
        "--dtype",
        "fp32",
        "--stage",
        "3",
    )
    assert (
        found["strategies"][0]["params"] == 3 * 65 * 64
        and found["strategies"][0]["peak"]["bytes"] > 0
    )
    assert (
        sum(found["strategies"][0]["sent_bytes"].values())
        > 3 * found["strategies"][0]["params"] * 4 * 3 / 4
    )
    without = planned(
        capfd, "planned_models:Net", "--gpus", "4", "--dtype", "fp32", "--stage", "3"
    )
    assert without["strategies"][0]["peak"] is None
    assert (
        without["strategies"][0]["persistent_bytes"]
        == found["strategies"][0]["persistent_bytes"]
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("planned_models:needs", "needs arguments (path); give a function without any"),
        ("planned_models:lazy", "gets its shape from the first batch"),
        ("planned_models:reads", "cannot be built without data or files"),
        ("planned_models:other", "returned a int; it must return a torch.nn.Module"),
        ("planned_models:number", "is a int; give a module class or a function"),
        ("planned_models:gone", "cannot be imported"),
        ("no_such_module:gone", "cannot be imported"),
        ("Net", "neither a file nor an import path"),
        ("config.json", "no configuration that transformers knows"),
    ],
)
def test_a_model_that_cannot_be_planned_is_refused_by_name(
    name: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "planned_models.py").write_text(MODULE)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert says in complaint(capfd, name)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--gpus", "8"],
            "give a model (package.module:factory or config.json) or --params",
        ),
        ([*SMALL, "--gpu-memory", "80"], "write it with its unit, for example 80GiB"),
        ([*SMALL, "--inter", "400"], "write bytes as 450GB/s or bits as 400Gb/s"),
        ([*SMALL, "--gpus", "1.5"], "whole number"),
        ([*SMALL, "--gpu-memory", "1GiB"], "leaves nothing"),
        ([*SMALL, "--stage", "4"], "invalid choice"),
        (
            ["--params", "1000", "--layers", "32"],
            "parameters are too few for 32 layers",
        ),
        ([*SMALL, "--gpus", "64000000"], "more ranks than elements"),
        ([*SMALL, "--machine", "no such file"], "is no machine file"),
        (
            ["--calibrate", "--machine", "no such folder/mine.json"],
            "there is no folder no such folder",
        ),
        (
            [*SMALL, "--plot", "no such folder/plan.png"],
            "there is no folder no such folder",
        ),
    ],
)
def test_bad_input_is_refused_by_name(
    arguments: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert says in complaint(capfd, *arguments)


@pytest.mark.parametrize(
    ("params", "layers"), [(125e6, 12), (1.3e9, 24), (7e9, 32), (70e9, 80), (1e12, 128)]
)
def test_a_decoder_has_about_as_many_parameters_as_asked(
    params: float, layers: int
) -> None:
    with Rehearsal(1):
        model, _ = of_count(
            int(params), layers, batch=1, sequence=8, dtype=torch.bfloat16
        ).build()
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(
            params, rel=0.08
        )


def test_parameters_without_memory_are_counted_once_each() -> None:
    """K1: on the meta device all addresses are equal, and ties are one parameter."""
    workload = Workload(
        title="", tokens=1, build=lambda: (models.Toy(20, tied=True), None)
    )
    found = forecast(workload, Strategy(stage=1), Setting(world=4))
    model = models.Toy(20, tied=True)
    assert found.params == sum(p.numel() for p in model.parameters())
    assert len(list(model.parameters())) == 121


def test_padding_is_what_equal_shards_add() -> None:
    """Without it a rank holds W-ths of parameters, gradients and two moments in fp32:
    16 bytes for each parameter."""
    workload = Workload(title="", tokens=1, build=lambda: (models.Toy(20), None))
    found = forecast(workload, Strategy(stage=3), Setting(world=4))
    held = found.memory.total - found.memory.tables
    assert 0 < found.padding < held
    assert held - found.padding == pytest.approx(16 * found.params / 4, abs=1)


def gradients_of_stage_2() -> tuple[int, int, int]:
    """Return the bytes of gradients after a step, of scratch memory at its peak, and of
    the largest bucket."""
    case, model = foresight.Case(2, 2), foresight.model(layers=8)
    optimizer = sharded(model, 2, buckets=case.buckets)
    foresight.step(case, model, optimizer)
    zero = optimizer.coordinator
    return (
        optimizer.memory().gradients,
        zero.transport.peak_bytes,
        max(4 * b.numel for b in zero.layout.buckets),
    )


def test_stage_2_keeps_no_full_gradient_buffer() -> None:
    """K3: 4/N bytes per parameter and a few buckets, as planned; not 4."""
    full = 4 * sum(p.numel() for p in foresight.model(layers=8).parameters())
    with Rehearsal(2):
        planned = gradients_of_stage_2()
    gradients, peak, largest = planned
    assert full / 2 <= gradients < 0.6 * full and peak <= 4 * largest < full / 3
    assert ranks.run(2, gradients_of_stage_2) == [planned, planned]


def test_only_what_computes_takes_time() -> None:
    """Not views, bare memory, or questions about a device; but updates in place do."""
    with Rehearsal(1) as rehearsal:
        x = torch.empty(4, 8, device="cuda")
        assert x.device.type == "cuda" and x.view(32).t().shape == (32,)
        assert rehearsal.record().events == []
        x.add_(1.0)
        x @ x.t()
        assert rehearsal.record().events == [
            Work("forward", flops=2 * 4 * 8 * 4, bytes=2 * x.nbytes, operations=2)
        ]


def test_a_rehearsal_refuses_to_read_what_is_not_there() -> None:
    """As the run would, so that a dry run finds scripts that do it."""
    with Rehearsal(2):
        model = foresight.model()
        optimizer = sharded(model, 3)
        foresight.step(foresight.Case(2, 3), model, optimizer)
        weight = next(model.parameters())
        with pytest.raises(RuntimeError, match="is sharded"):
            weight + 1
        with pytest.raises(RuntimeError, match=r"clip_grad_norm_"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.full_params():
            assert (weight + 1).shape == weight.shape


# ---------------------------------------------------------------------- what it says


def test_the_report_adds_up(capfd: pytest.CaptureFixture[str]) -> None:
    found = planned(capfd, *SMALL, "--gpus", "64", "--accumulate", "2")
    for strategy in found["strategies"]:
        assert strategy["fits"] and strategy["peak"]["bytes"] > sum(
            strategy["persistent_bytes"].values()
        )
        assert strategy["sent_bytes"].keys() == {
            "reduce_scatter",
            "all_gather",
            "all_gather_words",
        }
        assert strategy["inside_bytes"] + strategy["across_bytes"] == pytest.approx(
            sum(strategy["sent_bytes"].values()), rel=1e-3
        )
        assert (
            strategy["step_s"] >= strategy["compute_s"] > 0
            and 0 < strategy["utilisation"] < 1
        )
    held = [
        sum(strategy["persistent_bytes"].values()) for strategy in found["strategies"]
    ]
    assert held[0] > held[1] > held[2]
    assert found["recommended"] == "stage 1, fp32"


def test_the_command_prints_a_table_and_draws(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "plan.png"
    assert cli.main(["plan", *SMALL, "--gpus", "16", "--plot", str(picture)]) == 0
    printed = capfd.readouterr().out
    assert (
        "Take stage 1, fp32" in printed
        and "activations" in printed
        and "assumed: H100 nodes" in printed
    )
    assert picture.read_bytes().startswith(b"\x89PNG")


def made(
    stage: int,
    needs: float,
    *,
    recipe: str = "fp32",
    checkpointing: bool = False,
    state: float = 1,
    unit: float = 0.1,
    world: int = 8,
    sent: int = 0,
    flops: int = 3 * 10**12,
) -> Forecast:
    """Return a forecast that needs so many GiB."""
    trace = Trace(
        [Work("forward", flops=flops), Launch(1, "all_gather", world, sent), Wait(1)]
    )
    return Forecast(
        strategy=Strategy(
            stage=stage,
            recipe=recipe,
            precision=Precision(),
            checkpointing=checkpointing,
        ),
        setting=Setting(world=world),
        params=10**9,
        padding=0,
        others=0,
        memory=Memory(
            parameters=int(state * GIB),
            gradients=0,
            master=0,
            moments=0,
            buffers=0,
            tables=0,
        ),
        peak=Peak(int(needs * GIB)),
        largest_unit=int(unit * GIB),
        calls=(),
        trace=trace,
        samples=1,
    )


@pytest.mark.parametrize(
    ("forecasts", "stage", "says"),
    [
        ([made(1, 20), made(2, 15), made(3, 5)], 1, "needs 20.00 GiB of 38.00 GiB"),
        ([made(1, 50), made(2, 30), made(3, 5)], 2, "stage 1 would need 50.00 GiB"),
        ([made(1, 50), made(2, 45), made(3, 20)], 3, "stage 2 would need 45.00 GiB"),
        ([made(3, 50), made(3, 30, recipe="8bit")], 3, "with fp32 state nothing fits"),
        (
            [made(3, 50), made(3, 20, checkpointing=True, flops=4 * 10**12)],
            3,
            "checkpointing saves 30.00 GiB of activations for 33% more compute",
        ),
        ([made(3, 20, world=64, sent=10**12)], 3, "zerokern does not have them yet"),
        ([made(1, 20, sent=10**12)], 1, "no_sync(), hide it"),
        ([made(3, 90, unit=30)], None, "tensor parallelism"),
        ([made(3, 90, state=80)], None, "take more GPUs"),
        ([made(3, 90, state=5)], None, "take a smaller micro-batch"),
    ],
)
def test_the_recommendation_has_a_reason(
    forecasts: list[Forecast], stage: int | None, says: str
) -> None:
    advice = advise(forecasts, 40 * GIB, 2 * GIB)
    assert (advice.strategy and advice.strategy.stage) == stage
    assert says in advice.reason


def test_gathers_in_forward_are_recommended_where_they_help() -> None:
    slow = made(1, 20, sent=10**12)
    assert (
        "gather_in_forward=True"
        in advise(
            [slow], 40 * GIB, 2 * GIB, lambda strategy: made(1, 20, sent=10**11)
        ).reason
    )
    assert (
        "gather_in_forward"
        not in advise([slow], 40 * GIB, 2 * GIB, lambda strategy: slow).reason
    )
    assert (
        "gather_in_forward"
        not in advise([slow], 40 * GIB, 2 * GIB, lambda strategy: made(1, 39)).reason
    )


# ---------------------------------------------------------------------- time

EVEN = Machine(
    compute=1.0,
    memory=1.0,
    per_operation=0.0,
    intra=1.0,
    inter=1.0,
    latency=0.0,
    per_node=4,
)


def launch(number: int, sent: int) -> Launch:
    return Launch(number, "reduce_scatter", 4, sent)


def test_a_transfer_runs_beside_what_is_computed_until_it_is_waited_for() -> None:
    trace = Trace(
        [launch(1, 5), Work("forward", flops=3), Wait(1), Work("forward", flops=2)]
    )
    timing = replay(trace, EVEN, 4)
    assert (timing.step, timing.compute, timing.wire, timing.exposed) == (7, 5, 5, 2)


def test_transfers_take_the_wire_one_after_the_other() -> None:
    trace = Trace(
        [launch(1, 5), launch(2, 5), Wait(1), Work("forward", flops=3), Wait(2)]
    )
    assert replay(trace, EVEN, 4).step == 10


def test_the_first_gather_and_the_last_reduction_are_exposed() -> None:
    """Stage 3 with one unit ahead, whose gathers take less than its computation."""
    events: list[Any] = [launch(0, 2), Wait(0)]
    for unit in range(1, 5):
        events += [launch(unit, 2), Work("forward", flops=3), Wait(unit)]
    events += [Work("forward", flops=3), launch(9, 2), Wait(9)]
    timing = replay(Trace(events), EVEN, 4)
    assert timing.exposed == 2 + 2 and timing.step == 5 * 3 + 4


def test_a_step_waits_for_the_gathers_of_the_one_before() -> None:
    """Two units; gathers are launched at the end of a step and waited for in the next
    forward."""
    unit = Work("forward", flops=3)
    events = [Wait(1), unit, Wait(2), unit, launch(3, 2), launch(4, 7)]
    timing = replay(Trace(events), EVEN, 4)
    assert (timing.exposed, timing.step) == (
        2 + 4,
        2 + 3 + 4 + 3,
    ), "the second gather takes until 2 + 7"


def test_a_rehearsal_of_gathers_in_forward_takes_them_into_account() -> None:
    workload = of_count(int(30e6), 4, batch=1, sequence=64, dtype=torch.float32)
    times = {}
    for late in (False, True):
        buckets = Buckets(bytes=2**20, gather_in_forward=late)
        slow = Machine(intra=1e9, inter=1e9)
        times[late] = forecast(
            workload, Strategy(stage=1), Setting(world=8, machine=slow, buckets=buckets)
        ).timing()
    assert times[True].wire == pytest.approx(times[False].wire)
    assert times[False].wire * 0.9 < times[True].step < times[False].step


def test_bytes_between_nodes_depend_on_the_algorithm() -> None:
    machine = Machine(per_node=4, native_gather=True)
    gather, reduction = (
        Launch(1, "all_gather", 16, 1500),
        Launch(2, "reduce_scatter", 16, 1500),
    )
    assert machine.split(reduction, 16) == (300, 1200), "3 of 15 peers are on the node"
    assert machine.split(gather, 16) == (
        1125,
        375,
    ), "a ring crosses once for the four ranks of a node"
    assert Machine(per_node=4, native_gather=False).split(gather, 16) == (300, 1200)
    assert machine.split(gather, 4) == (
        1200,
        0,
    ), "in a world of 4 it sends 3/4 of the buffer instead of 15/16"


def test_ranks_that_share_cores_slow_each_other_down() -> None:
    machine = Machine(
        compute=1.0,
        intra=1.0,
        inter=1.0,
        latency=0.0,
        per_operation=0.0,
        cores=2.0,
        per_node=64,
    )
    trace = Trace([launch(1, 6), Work("forward", flops=3), Wait(1)])
    assert replay(trace, machine, 2).step == pytest.approx(3 + 6 / 1.5, rel=1e-6)
    assert replay(trace, machine, 4).step == pytest.approx(2 * (3 + 6), rel=1e-6)


# ---------------------------------------------------------------------- the ledger


def test_the_ledger_counts_what_lives() -> None:
    with Ledger() as ledger:
        a = torch.zeros(100)
        b = a.view(10, 10)
        assert ledger.live == 400
        del a
        assert ledger.live == 400 and b.numel() == 100
        c = torch.ones(50)
        assert ledger.live == 600
        del c
        b.untyped_storage().resize_(0)
        assert ledger.live == 0 and ledger.peak.bytes == 600
        assert set(ledger.peak.holders) == {"forward: zeros", "forward: ones"}


def test_the_ledger_agrees_with_the_allocator() -> None:
    """torch's profiler is told of every allocation on the CPU; the peak of a step is
    the same to 3 %."""

    def peaks() -> tuple[int, int]:
        with Ledger() as ledger:
            case, model = foresight.Case(2, 3), foresight.model(layers=8)
            optimizer = sharded(model, 3)
            for _ in range(2):
                foresight.step(case, model, optimizer)
            gc.collect()
            ledger.reset_peak()
            before = ledger.live
            with torch.profiler.profile(profile_memory=True) as profile:
                foresight.step(case, model, optimizer)
            return ledger.peak.bytes - before, _allocated(profile)

    for ours, allocators in ranks.run(2, peaks):
        assert ours == pytest.approx(allocators, rel=0.03)


def _allocated(profile: Any) -> int:
    """Return by how much allocated bytes grew at most."""
    waiting = list(profile.profiler.kineto_results.experimental_event_tree())
    found = []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation:
            found.append(
                (
                    event.start_time_ns,
                    event.extra_fields.total_allocated,
                    event.extra_fields.alloc_size,
                )
            )
    found.sort()
    _, total, size = found[0]
    return max(total for _, total, _ in found) - (total - size)
