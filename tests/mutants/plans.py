"""Faults in what a plan relies on."""

from tests.mutants.fault import Fault

GUARDS, CALLS, BATCHES = "plans/test_guards.py", "plans/test_compiled.py", "plans/test_batches.py"
POINTS, EXPORTED = "plans/test_points.py", "plans/test_exported.py"
LAUNCHED = "plans/test_cudagraphs.py"

PLANS = [
    Fault(
        "the numbers that a plan has read are not compared",
        "plans/plan.py",
        "if repr(numbers.tolist()) != expected:",
        "if False:",
        f"{GUARDS}::TestNumbersThatAreRead {GUARDS}",
    ),
    Fault(
        "what is closed over is a constant until an operation takes it",
        "plans/recorder.py",
        "return self._nodes.get(x) is None or bool(self._dependent.get(storage(x)))",
        "return bool(self._dependent.get(storage(x)))",
        f"{GUARDS}::TestWhatIsClosedOver {GUARDS}",
    ),
    Fault(
        "the attributes of an object are what they were",
        "plans/watch.py",
        "if [*map(id, held), *map(id, held.values())] != ids and",
        "if len(held) * 2 != len(ids) and",
        f"{GUARDS}::TestWhatIsClosedOver {GUARDS}",
    ),
    Fault(
        "which arguments share memory does not matter",
        "plans/key.py",
        "shared(tensors), tuple(map(_token, others))",
        "None, tuple(map(_token, others))",
        f"{CALLS}::TestArguments {CALLS}",
    ),
    Fault(
        "constants of a plan are results",
        "plans/finish.py",
        "if not recorder.written.get(storage(x)) and storage_of(x) not in returned",
        "if not recorder.written.get(storage(x))",
        f"{CALLS}::TestResults {CALLS}",
    ),
    Fault(
        "generators are not put back where f has done so",
        "plans/draws.py",
        "if now == self._now[key]:",
        "if now in self._known[key]:",
        f"{CALLS}::TestRandomNumbers {CALLS}",
    ),
    Fault(
        "a call that is not as the plan has it draws twice",
        "plans/plan.py",
        "            set_states(before)\n",
        "            pass\n",
        f"{CALLS}::TestRandomNumbers {CALLS}",
    ),
    Fault(
        "each batch draws as the first one by a plan",
        "plans/batches.py",
        "found.append(tuple(seeded(own[:n], d.key, d.first)))",
        "found.append(tuple(seeded(own[:n], d.key, 0)))",
        f"{BATCHES}::TestWays {BATCHES}",
    ),
    Fault(
        "a batch by a plan does not know the phase before",
        "plans/batches.py",
        "                    part.know(own)\n",
        "                    pass\n",
        f"{BATCHES}::TestWays {BATCHES}",
    ),
    Fault(
        "the loss of a batch by a plan is not weighed",
        "evaluation/brought.py",
        "kept, shapes, places, engine.scalar, outputs, aux = found",
        "kept, shapes, places, _, outputs, aux = found",
        f"{BATCHES}::TestWays {BATCHES}",
    ),
    Fault(
        "memory that is written later is read where no vector changes it",
        "plans/halves.py",
        "order[user] < last",
        "order[user] < 0",
        f"{POINTS}::TestOneVectorAfterTheOther {POINTS}",
    ),
    Fault(
        "memory that is written for each vector is made once",
        "plans/halves.py",
        "if early or any(node in found for node in writing):",
        "if early:",
        f"{POINTS}::TestOneVectorAfterTheOther {POINTS}",
    ),
    Fault(
        "parameters may be written behind a linearisation by a plan",
        "plans/halves.py",
        "if any(version(x) != known for x, known in self.of_caller):",
        "if False:",
        f"{POINTS}::TestOneVectorAfterTheOther {POINTS}",
    ),
    Fault(
        "a graph of torch.compile has a plan for another shape of the result",
        "plans/within.py",
        "if _sizes(found) != _RESULTS[place][1]:",
        "if False:",
        "plans/test_within_compile.py",
    ),
    Fault(
        "a program asserts nothing of the numbers that it reads",
        "plans/exported.py",
        "(_bits(graph, numbers, known), held(_bits_of(known)))",
        "(_bits(graph, numbers, known), _bits(graph, numbers, known))",
        EXPORTED,
    ),
    Fault(
        "a program takes numbers that look alike for the same ones",
        "plans/exported.py",
        "return x.view(_BITS[x.element_size()]) if x.is_floating_point() else x",
        "return x",
        EXPORTED,
    ),
    Fault(
        "a program has the operations of a plan that does not hold any more",
        "plans/exported.py",
        "what = watch.changed(exporting=True)",
        'what = ""',
        EXPORTED,
    ),
    Fault(
        "a program reads what is closed over where somebody may write it",
        "plans/exported.py",
        "x.detach().permute(order).clone(memory_format=torch.contiguous_format)",
        "x.detach().permute(order)",
        EXPORTED,
    ),
    Fault(
        "a launch overwrites the results of the one before",
        "plans/cudagraphs.py",
        "found = tree.map_tensors(copied, self.found)",
        "found = self.found",
        LAUNCHED,
    ),
    Fault(
        "a launch reads the arguments of the first one",
        "plans/cudagraphs.py",
        "if place is not None:",
        "if False:",
        LAUNCHED,
    ),
    Fault(
        "a CUDA graph and its statistic hold each other",
        "plans/cudagraphs.py",
        "say, self.say = self.say, None",
        "say = self.say",
        LAUNCHED,
    ),
    Fault(
        "a capture repeats the random numbers that it drew",
        "plans/cudagraphs.py",
        "if not all(same_state(state_of(g), state) for g, state in before):",
        "if False:",
        LAUNCHED,
    ),
]
