"""The rules, in the order they are judged. A divergence may be a consequence of a divergence of a
rule that is listed above its own, or of its own rule; ``upstream`` names these rules.

A name occurs twice if other kinds of case check the same promise in another way, or at another
place in the order.
"""

from __future__ import annotations

from functools import partial

from narrowfuzz.case.kind import (
    APPROXIMATE,
    COMPILABLE,
    CONVERTED,
    IN_STAGES,
    LAYERS,
    MESHES,
    ON_RANKS,
    ONE_MODEL,
    THREADS_OR_PROCESSES,
    kind_of,
)
from narrowfuzz.case.spec import Spec
from narrowfuzz.rules.census import check_census
from narrowfuzz.rules.clipping import check_clipping, check_clipping_on_ranks
from narrowfuzz.rules.contract import check_contract
from narrowfuzz.rules.gemm import (
    check_bias_gradient,
    check_gemm_grads,
    check_gemm_output,
    check_lattice,
    check_layer,
)
from narrowfuzz.rules.gradient_sum import check_gradient_sum
from narrowfuzz.rules.ladder import check_ladder
from narrowfuzz.rules.library import contract as library_contract
from narrowfuzz.rules.library import equal_runs
from narrowfuzz.rules.library import operands as library_operands
from narrowfuzz.rules.library import own_backward as library_own_backward
from narrowfuzz.rules.library import recompute as library_recompute
from narrowfuzz.rules.library.casts import check_casts
from narrowfuzz.rules.library.contract import check_balance
from narrowfuzz.rules.library.precision import check_precision
from narrowfuzz.rules.library.ranks import check_alone, check_shared
from narrowfuzz.rules.operators import check_operators
from narrowfuzz.rules.own_backward import check_own_backward
from narrowfuzz.rules.own_functions import DERIVATIVES, check_own_functions
from narrowfuzz.rules.quantiser import check_amax, check_cast, check_scale
from narrowfuzz.rules.recompute import check_checkpoint, check_recompute, check_statistics
from narrowfuzz.rules.relations_operators import check_relations
from narrowfuzz.rules.relations_recipe import check_copies, check_recipe
from narrowfuzz.rules.relations_shape import check_summed, check_variants
from narrowfuzz.rules.relations_state import (
    check_bias,
    check_microbatches,
    check_reload,
    check_steps,
)
from narrowfuzz.rules.relations_training import (
    check_evaluations,
    check_kept_graph,
    check_loss_scaling,
    check_order,
    check_reloads,
)
from narrowfuzz.rules.relations_values import (
    check_below_amax,
    check_locality,
    check_monotone,
    check_negation,
    check_requantise,
    check_scaling,
)
from narrowfuzz.rules.repeat import check_repeat
from narrowfuzz.rules.rule import (
    Reads,
    Rule,
    bound,
    exact,
    ratio,
    relation,
    seen,
    whole,
)
from narrowfuzz.rules.sharded import contract as of_ranks
from narrowfuzz.rules.sharded import loss_scale, results
from narrowfuzz.rules.sharded.census import check_quantised
from narrowfuzz.rules.sharded.operands import check_operands
from narrowfuzz.rules.sharded.products import check_products
from narrowfuzz.rules.sharded.ratio import check_put_together
from narrowfuzz.rules.sharded.resumed import check_resumed
from narrowfuzz.rules.sharded.steps import check_steps_on_ranks
from narrowfuzz.rules.sharded.weights import check_weights_after_steps
from narrowfuzz.rules.special import check_finite, check_nan_provenance
from narrowfuzz.rules.state.machine import check_machine
from narrowfuzz.rules.whole import check_ratio, check_strict

#: Sets of rules whose divergences explain others (``Rule.upstream``), from the contract up to the
#: whole run.
_CONTRACT = frozenset({"contract"})
_START = _CONTRACT | {"O1"}
_AMAX = _START | {"O4"}
_SCALE = _AMAX | {"O3"}
_QUANTISER = _SCALE | {"O2"}
_RECOMPUTED = _START | {"O13"}
_MULTIPLY = _QUANTISER | {"O5", "O15"}
_SEEN = _MULTIPLY | {"O11", "O13"}
_LAYER = _SEEN | {"O6"}
_WHOLE = _LAYER | {"O7", "O10", "O12", "O16", "O18", "O21", "O23", "O25"}
#: The same for relations between runs: a result that is wrong by itself explains a difference
#: between two runs. A relation that compares codes first and results second has itself upstream:
#: its wrong codes explain its wrong results.
_ARRANGED = _LAYER | {"O7", "O10", "O23"}
_LAID_OUT = _ARRANGED | {"R16", "R17"}
#: The same on ranks: rules about operands, about products, and all that explain a difference of
#: whole runs.
_SHARED = _CONTRACT | {"S7", "S3"}
_MULTIPLIED = _SHARED | {"O5", "O15", "O16", "S5"}
_RANKS = _MULTIPLIED | {"S1"}
#: The same in a library's own layers. ``_RUN`` is upstream of O13 (recomputes) and O19 (nothing
#: left pending), which the state machine, O14, does not explain.
_CASTS = _CONTRACT | {"O2"}
_RUN = _CASTS | {"O3", "O20"}
_STATE = _RUN | {"O14"}
_BALANCED = _STATE | {"O19"}

#: Values of ``Rule.reads``. Of rules that request a rerun: its results, its operands, operands with
#: scales, or all of these.
_RESULTS: tuple[Reads, ...] = ("results again",)
_OPERANDS: tuple[Reads, ...] = ("operands again",)
_CODES: tuple[Reads, ...] = (*_OPERANDS, "scales again")
_ALL: tuple[Reads, ...] = (*_RESULTS, *_CODES)
_STATES: tuple[Reads, ...] = ("results", "states")
_BIAS: tuple[Reads, ...] = ("bias gradient",)
#: Kinds of case whose linears are judged.
_LINEARS = (*CONVERTED, *MESHES)
#: Kinds of case on ranks in which losses may be scaled and gradients clipped before a step.
_STEPPED = (*MESHES, *IN_STAGES)

#: Rules of ranks that share data and linears.
shared = partial(whole, cases=MESHES)
shared_bound = partial(bound, scope="case", cases=MESHES)
#: Exact relations between a training and a rerun of it with other events or operands.
trained = partial(relation, scope="case")
#: Rules of a library's own layers: over their results and states, or over what was observed inside.
of_state = partial(whole, reads=_STATES, unfinished=True, cases=(LAYERS,))
inside = partial(whole, level="A", unfinished=True, cases=(LAYERS,))


def scaled(name: str, tensor: str) -> Rule:
    """A relation between a linear and a rerun of it with a tensor multiplied by a power of two."""
    return relation(name, partial(check_scaling, tensor=tensor), _SEEN)


def variant(name: str, upstream: frozenset[str], exchanged: frozenset[str] = frozenset()) -> Rule:
    """A relation between a linear and a rerun of it with its tensors arranged differently."""
    check = partial(check_variants, name=name)
    return relation(name, check, upstream | {name}, reads=_ALL, exchanged=exchanged)


RULES: tuple[Rule, ...] = (
    # whether it runs, and runs the same again
    whole("contract", check_contract, reads=("run",), unfinished=True),
    whole(
        "contract",
        of_ranks.check_contract,
        reads=("run",),
        unfinished=True,
        cases=ON_RANKS,
    ),
    of_state("contract", library_contract.check_contract, reads=("run",)),
    whole("census", check_census, reads=("conversion",), unfinished=True),
    whole("O1", check_repeat),
    # what is quantised
    seen("O4", check_amax, _START, ("amax",)),
    seen("O3", check_scale, _AMAX, ("scales",)),
    seen("O2", check_cast, _SCALE, ("operands",)),
    seen("O13", check_recompute, _START, ("recomputed",), scope="case"),
    whole("O18", check_statistics, _RECOMPUTED, ("statistics",)),
    shared("S7", check_quantised, _CONTRACT, ("conversion",), level="A"),
    shared("S3", check_operands, _CONTRACT, ("operands", "scales"), level="A"),
    # what is multiplied and added
    bound("O5", check_gemm_output, _RECOMPUTED | _SHARED, level="A", cases=_LINEARS),
    bound("O15", check_gemm_grads, _RECOMPUTED | _SHARED, level="A", cases=_LINEARS),
    exact("O11", check_nan_provenance, _MULTIPLY, ("nan",)),
    bound("O10", check_finite, _MULTIPLY | {"O11"}, ("finite",)),
    bound("O6", check_layer, _SEEN | {"O10"}),
    exact("O7", check_lattice, _LAYER),
    seen("O23", check_ladder, _LAYER),
    bound("O25", check_operators, _START | {"O13"}, ("operators",), scope="case"),
    bound("O26", check_clipping, _START | {"O25"}, scope="case"),
    bound("O16", check_bias_gradient, _SEEN | {"O25"}, _BIAS),
    bound("O21", check_gradient_sum, _SEEN | {"O16"}, level="A", scope="case"),
    # on ranks, and of whole runs in one process
    bound("O16", check_bias_gradient, _SHARED, _BIAS, cases=MESHES),
    shared_bound("S5", check_products, _SHARED, level="A"),
    shared("S1", results.check_equal, _MULTIPLIED, cases=ONE_MODEL),
    ratio("O9", check_put_together, _CONTRACT, cases=APPROXIMATE),
    shared("S14", loss_scale.check_loss_scale, _RANKS, cases=_STEPPED),
    shared("S12", results.check_stages, _CONTRACT | {"S14"}, cases=IN_STAGES),
    shared_bound("S2", results.check_gradients, _RANKS),
    shared("S8", results.check_precomputed, _RANKS, _RESULTS, reruns=True),
    shared("S9", results.check_compiled, _RANKS | {"S12"}, cases=COMPILABLE),
    shared("S10", results.check_processes, _RANKS | {"O9"}, cases=THREADS_OR_PROCESSES),
    shared("S11", check_resumed, _RANKS | {"S14"}),
    shared("S4", results.check_agreement, _RANKS | {"S2", "S14", "O9"}, cases=ONE_MODEL),
    shared_bound("S6", results.check_norm, _RANKS | {"S2", "S4"}),
    shared_bound("O26", check_clipping_on_ranks, _RANKS | {"S2", "S4"}, cases=_STEPPED),
    shared_bound("S15", check_steps_on_ranks, _RANKS | {"S2", "S4", "S14", "O26"}),
    shared("S16", check_weights_after_steps, _RANKS | {"S4"}, ("operands",)),
    whole("O12", check_checkpoint, _WHOLE),
    whole("O8", check_strict, _WHOLE),
    ratio("O9", check_ratio, _WHOLE | {"O8"}),
    ratio("O22", check_own_backward, _WHOLE | {"O8", "O9"}),
    ratio("O24", check_own_functions, reads=(), data=(DERIVATIVES,)),
    # relations between runs
    scaled("R1", "input"),
    scaled("R2", "grad_output"),
    scaled("R3", "weight"),
    relation("R4", check_negation, _SEEN),
    variant("R5", _ARRANGED),
    variant("R6", _ARRANGED),
    variant("R7", _ARRANGED),
    variant("R8", _ARRANGED),
    variant("R9", _LAID_OUT),
    bound("R10", check_summed, _LAID_OUT, _RESULTS, reruns=True),
    variant("R11", _LAID_OUT, frozenset({"grad_input", "grad_weight"})),
    relation("R12", check_requantise, _SEEN, reads=_CODES, level="A"),
    seen("R13", check_monotone, _QUANTISER, ("operands",)),
    seen("R14", check_below_amax, _SEEN, _OPERANDS, reruns=True),
    seen("R15", check_locality, _SEEN, _OPERANDS, reruns=True),
    variant("R16", _ARRANGED),
    variant("R17", _SEEN),
    relation("R18", check_steps, _ARRANGED | {"R18"}, reads=_ALL),
    relation("R19", check_bias, _ARRANGED),
    relation("R20", check_reload, _ARRANGED | {"R20"}, reads=_ALL),
    relation("R21", check_recipe, _SEEN, reads=_CODES, level="A"),
    seen("R22", check_copies, _QUANTISER, ("second copies",)),
    trained("R23", check_microbatches, _WHOLE),
    trained("R24", check_evaluations, _WHOLE),
    trained("R25", check_reloads, _WHOLE),
    trained("R26", check_order, _WHOLE),
    whole("R27", check_kept_graph, _WHOLE),
    trained("R28", check_relations, _WHOLE),
    trained("R29", check_loss_scaling, _WHOLE),
    # a library's own layers, whose casts are observed before their operands
    inside("O2", check_casts, _CONTRACT, ("casts",)),
    inside("O3", library_operands.check_operands, _CASTS, ("operands",)),
    inside("O20", check_precision, _CONTRACT, ("formats",)),
    inside("O14", check_machine, _CONTRACT | {"O20"}, ("states", "kept state")),
    inside("O13", library_recompute.check_recompute, _RUN, ("recomputed",)),
    inside("O19", check_balance, _RUN, ("pending",)),
    of_state("O12", equal_runs.check_twin, _STATE | {"O13"}),
    ratio(
        "O22",
        library_own_backward.check_own_backward,
        _STATE | {"O13"},
        _STATES,
        unfinished=True,
        cases=(LAYERS,),
    ),
    # after O19: what a run leaves set aside may change a later run
    of_state("O1", equal_runs.check_after_others, _BALANCED, reads=("after other models",)),
    of_state("S1", check_alone, _BALANCED, reads=("results on ranks", "states on ranks")),
    inside("S13", check_shared, _BALANCED | {"S1"}, ("states on ranks",)),
    of_state("R20", equal_runs.check_reload, _STATE | {"O1"}),
)

#: The rules by name, in the order in which lists show them. If a name occurs twice in the table, it
#: is the rule for converted models.
BY_NAME: dict[str, Rule] = {
    rule.name: rule
    for mine in (LAYERS, *ON_RANKS, *CONVERTED)
    for rule in RULES
    if mine in rule.cases
}


def rules_of(spec: Spec) -> dict[str, Rule]:
    """The rules that judge this Spec's cases, in order, by name."""
    kind = kind_of(spec)
    return {rule.name: rule for rule in RULES if kind in rule.cases}
