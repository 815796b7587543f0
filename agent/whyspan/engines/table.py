"""The engines of this host, from marks: jobs, steps, cold starts. Bounded; the same marks give the same table."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from whyspan import marks as m
from whyspan.engines import anonymous
from whyspan.engines.calls import Turns
from whyspan.engines.inflation import Inflation
from whyspan.engines.prefixes import Prefixes
from whyspan.engines.records import Client, Execution, Instance, Job, Preemption, StageRun, StepRun
from whyspan.engines.spans import Spans
from whyspan.engines.usual import UsualSteps
from whyspan.facts import Facts
from whyspan.lru import Lru
from whyspan.marks import Mark, Scheduled
from whyspan.model import Request

MAX_STEPS: Final = 10_000
MAX_JOBS: Final = 10_000
MAX_INSTANCES: Final = 512
_MAX_LISTED: Final = 4096  # deferrals, preemptions of one job
#: Requests of one connection that an arrival may belong to: those that one batch brings.
_MAX_PIPELINED: Final = 64
#: A job that is not known and takes so many tokens in a step computes a prompt; fewer may be drafted tokens.
_PROMPT_TOKENS: Final = 16
#: More of one step are made up.
_MAX_EXECUTIONS: Final = 512
_MAX_STAGES: Final = 256
_MAX_MODELS: Final = 7
_OTHER: Final = "other"  # a tag that is not allowed


class _Front:
    """What a front end has said of a request that the engine core has not named yet."""

    __slots__ = ("arrived", "tgid", "tid", "tokenised", "ts_ns")

    def __init__(self, arrived: m.Arrived, mark: Mark) -> None:
        self.arrived, self.tgid, self.tid, self.ts_ns = arrived, mark.tgid, mark.tid, mark.ts_ns
        self.tokenised = (0, 0, 0)


class _Core:
    """One engine core: its steps in order, its jobs by number."""

    def __init__(self, tgid: int) -> None:
        self.tgid = tgid
        self.steps: deque[StepRun] = deque()
        self.by_step: dict[int, StepRun] = {}
        self.jobs: dict[int, Job] = {}
        self.alive: dict[int, Job] = {}  # not finished, in the order they were queued
        self.costly: dict[int, Job] = {}  # of these, those that asked for more per token
        self.open: dict[int, StepRun] = {}  # steps in progress, oldest first
        self.finished: deque[Job] = deque()  # in the order they did
        self.usual = UsualSteps()
        self.prefixes = Prefixes()
        self.done_ns = 0  # when the last step was done
        self.blocked: tuple[int, str] = (0, "")  # who is first in the queue and was passed over, and why
        self.ended_ns = 0  # the process ended
        self.counts: Counter[str] = Counter()
        self.templates: Counter[str] = Counter()  # prompts by tag
        self.runs: anonymous.Runs | None = None  # of an engine that names no requests
        self.engine = ""  # its name


class EngineTable:
    """Everything engines have said in the last while.

    ``counts`` are totals since the start by name: steps, batches (steps with something in them), sequences and tokens
    in them, step_ns, preemptions, recomputed, prompt_tokens, cached_tokens, output_tokens, evicted_blocks,
    unknown_numbers.
    """

    def __init__(self, window_ns: int = 60_000_000_000, templates: frozenset[str] = frozenset()) -> None:
        """*templates*: the tags of prompt templates that may be told apart; any other is ``other``."""
        self.reconfigure(window_ns, templates)
        self._cores: OrderedDict[int, _Core] = OrderedDict()
        self._instances: Lru[int, Instance] = Lru(MAX_INSTANCES)
        self._fronts: Lru[tuple[int, str], _Front] = Lru(MAX_JOBS)
        self._enqueued: Lru[str, tuple[m.Enqueued, Mark]] = Lru(MAX_JOBS)
        self._by_engine_id: Lru[str, Job] = Lru(MAX_JOBS)
        self._by_front_number: Lru[tuple[int, int], Job] = Lru(MAX_JOBS)
        self._pending_numbers: Lru[tuple[int, int], str] = Lru(MAX_JOBS)
        self._clients: Lru[tuple[int, int, int], deque[Client]] = Lru(MAX_JOBS)
        self._left: Lru[tuple[int, int], int] = Lru(MAX_JOBS)  # clients that left, by request
        self._by_connection: Lru[tuple[int, int], list[Job]] = Lru(MAX_JOBS)
        self._executed: Lru[tuple[int, int], list[Execution]] = Lru(MAX_JOBS)  # before their step is known
        self._core_of_worker: Lru[int, int] = Lru(MAX_INSTANCES)
        self.gauges: Lru[int, tuple[int, m.Gauges]] = Lru(MAX_INSTANCES)
        self.health: Lru[int, tuple[int, m.Health]] = Lru(MAX_INSTANCES)
        self.layers: Lru[int, tuple[int, m.Layers]] = Lru(MAX_INSTANCES)
        self._inflation = Inflation()
        self.turns = Turns()
        self.spans = Spans()
        self.counts: Counter[str] = Counter()

    # -- in ---------------------------------------------------------------------------------------------------

    def reconfigure(self, window_ns: int, templates: frozenset[str]) -> None:
        """Go by these from now on; see the constructor."""
        self._window_ns, self._templates = window_ns, templates

    def feed(self, marks: Iterable[Mark], facts: Facts, now_ns: int) -> None:
        """Take in marks, in order of time.

        Args:
            marks: Of one batch.
            facts: What is known of processes: a mark is joined only with marks of the same service.
            now_ns: The batch's time; what is older than the window goes.
        """
        for mark in marks:
            handle = _HANDLERS.get(type(mark.body))
            if handle is not None:
                handle(self, mark, mark.body, facts)
        self._expire(now_ns)

    def seen(self, steps: Iterable[anonymous.Seen]) -> None:
        """Take in steps that name no requests, in order of time. An engine that names them does not need it."""
        for s in steps:
            core = self._core(s.tgid, s.ts_ns)
            runs = self._runs(core)
            if runs is None:
                continue
            core.engine = s.engine
            new, ended = runs.take(s)
            if new is not None:
                self._insert(core, new)
            for step in ended:
                self._ran(core, step)

    @staticmethod
    def _runs(core: _Core) -> anonymous.Runs | None:
        """The steps of a core that name no requests; None of one that names them."""
        if core.runs is None and not core.steps and not core.jobs:
            core.runs = anonymous.Runs()
        return core.runs

    def _insert(self, core: _Core, step: StepRun) -> None:
        """Put in a step; of those told of at their end one may have begun before another."""
        later = 0
        while later < len(core.steps) and core.steps[-1 - later].begin_ns > step.begin_ns:
            later += 1
        core.steps.insert(len(core.steps) - later, step)
        core.by_step[step.step] = core.open[step.step] = step
        assert step.counts is not None
        for name in ("steps", "batches"):
            self._count(core, name)
        self._count(core, "sequences", step.counts.sequences)
        self._count(core, "tokens", step.counts.tokens)
        step.usual_ns = core.usual.of(step.batch)
        while len(core.steps) > MAX_STEPS:
            self._drop_step(core)

    def _ran(self, core: _Core, step: StepRun) -> None:
        core.open.pop(step.step, None)
        core.done_ns = max(core.done_ns, step.done_ns)
        self._count(core, "step_ns", max(step.wall_ns, 0))
        assert step.counts is not None
        if step.counts.whole or step.counts.inferred or step.counts.result:
            return
        if step.counts.prefill_tokens:
            core.usual.add_prefill(step)
        else:
            core.usual.add(step)

    def begun(self, requests: Iterable[Request]) -> None:
        """Take in the HTTP requests whose heads were read, so that arrivals find the connection they came by."""
        for r in requests:
            self.turns.begun(r)
            client = Client(
                r.trace_id,
                r.parent_span_id,
                r.tgid,
                r.cookie,
                r.seq,
                r.start_ns,
                r.request_bytes,
                r.route,
            )
            key = r.tgid, r.client_port, r.server_port
            known = self._clients.get(key)
            if known is None:
                known = deque(maxlen=_MAX_PIPELINED)
                self._clients.put(key, known)
            known.append(client)

    def ended(self, requests: Iterable[Request]) -> None:
        """Take in the HTTP requests that ended: a job that goes on for a client that left holds its slot for nobody."""
        for r in requests:
            self.turns.ended(r)
            if r.outcome in ("reset", "killed"):
                left_ns = r.left_ns or r.end_ns
                self._left.put((r.cookie, r.seq), left_ns)
                for job in self._by_connection.get((r.cookie, r.seq)) or ():
                    job.client_left_ns = job.client_left_ns or left_ns

    def gone(self, tgid: int, ts_ns: int) -> None:
        """A process ended: its steps in progress will not end."""
        instance = self._instances.get(tgid)
        if instance is not None:
            instance.ended_ns = ts_ns
        core = self._cores.get(tgid)
        if core is None:
            return
        core.ended_ns = ts_ns
        for step in core.open.values():
            step.done_ns = max(ts_ns, step.from_ns)
        core.open.clear()
        for number in list(core.alive):
            self._finish(core, number, ts_ns, "killed")

    # -- out --------------------------------------------------------------------------------------------------

    def jobs_of(self, request: Request) -> list[Job]:
        """Return the jobs that serve an HTTP request, in the order they were queued."""
        found = self._by_connection.get((request.cookie, request.seq))
        return list(found) if found else []

    def job(self, core: int, number: int) -> Job | None:
        """Return a core's job by its number."""
        found = self._cores.get(core)
        return found.jobs.get(number) if found is not None else None

    def jobs(self, core: int) -> list[Job]:
        """Return all jobs known of a core."""
        found = self._cores.get(core)
        return list(found.jobs.values()) if found is not None else []

    def steps(self, core: int, start_ns: int, end_ns: int) -> list[StepRun]:
        """Return the steps of a core that overlap an interval, in order; also one in progress."""
        found = self._cores.get(core)
        if found is None:
            return []
        out = []
        for step in reversed(found.steps):
            if step.done_ns and step.done_ns <= start_ns:
                if found.runs is not None and step.begin_ns > start_ns - self._window_ns:
                    continue  # threads take turns in any order
                break
            if step.begin_ns < end_ns:
                out.append(step)
        out.reverse()
        return out

    def anonymous(self, core: int) -> bool:
        """Return whether the steps of an engine core name no requests."""
        found = self._cores.get(core)
        return found is not None and found.runs is not None

    def engine_of(self, core: int) -> str:
        """Return the name of an engine: as it calls itself, else what its steps show it to be."""
        instance = self._instances.get(core)
        found = self._cores.get(core)
        named = instance.hello.engine if instance is not None and instance.hello is not None else ""
        return named or (found.engine if found is not None else "")

    def cores(self, service: str, facts: Facts) -> list[int]:
        """Return the engine cores of a service that are alive."""
        return [c.tgid for c in self._cores.values() if not c.ended_ns and facts.service(c.tgid) == service]

    def known_cores(self) -> list[int]:
        """Return every engine core that has spoken, those that ended of late too."""
        return list(self._cores)

    def counts_of(self, core: int) -> Mapping[str, int]:
        """Return a core's own totals, by the names of ``counts``."""
        found = self._cores.get(core)
        return found.counts if found is not None else {}

    def templates_of(self, core: int) -> Mapping[str, int]:
        """Return how many prompts a core was given, by the tag of their template, empty for none."""
        found = self._cores.get(core)
        return found.templates if found is not None else {}

    def last_step(self, core: int) -> StepRun | None:
        """Return the newest step of a core."""
        found = self._cores.get(core)
        return found.steps[-1] if found is not None and found.steps else None

    def steps_of(self, job: Job, start_ns: int, end_ns: int) -> list[StepRun]:
        """Return the steps a job was part of that overlap an interval, in order."""
        core = self._cores.get(job.core)
        if core is None:
            return []
        out = []
        for number in reversed(job.steps):
            step = core.by_step.get(number)
            if step is None or (step.done_ns and step.done_ns <= start_ns):
                break
            if step.begin_ns < end_ns:
                out.append(step)
        out.reverse()
        return out

    def in_progress(self, core: int) -> StepRun | None:
        """Return the step a core's workers are at: the oldest in progress."""
        found = self._cores.get(core)
        return next(iter(found.open.values()), None) if found is not None else None

    def working_since(self, core: int) -> int:
        """Return since when a core has had something to do and has not ended a step; 0 when it has nothing to do."""
        found = self._cores.get(core)
        if found is not None and found.runs is not None:
            step = next(iter(found.open.values()), None)
            return step.begin_ns if step is not None and not found.ended_ns else 0
        first = next(iter(found.alive.values()), None) if found is not None else None
        if found is None or first is None or found.ended_ns:
            return 0
        return max(found.done_ns, first.queued_ns)

    def alive(self, core: int) -> int:
        """Return how many jobs of a core are not finished."""
        return len(self.live_jobs(core))

    def live_jobs(self, core: int) -> list[Job]:
        """Return the jobs of a core that are not finished."""
        found = self._cores.get(core)
        return list(found.alive.values()) if found is not None else []

    def ended_ns(self, core: int) -> int:
        """Return when a core's process ended; 0 while it lives."""
        found = self._cores.get(core)
        return found.ended_ns if found is not None else 0

    def usual(self, core: int) -> UsualSteps | None:
        """Return what plain decode steps of a core usually take."""
        found = self._cores.get(core)
        return found.usual if found is not None else None

    def instance(self, tgid: int) -> Instance | None:
        """Return what a process has said of itself."""
        return self._instances.get(tgid)

    def instances(self) -> list[Instance]:
        """Return every process that has spoken."""
        return self._instances.values()

    # -- marks ------------------------------------------------------------------------------------------------

    def _instance(self, mark: Mark) -> Instance:
        found = self._instances.get(mark.tgid)
        if found is None or 0 < found.ended_ns < mark.ts_ns:  # another process by the same number
            found = Instance(mark.tgid)
            self._instances.put(mark.tgid, found)
        found.last_ns = mark.ts_ns
        return found

    def _core(self, tgid: int, ts_ns: int) -> _Core:
        core = self._cores.get(tgid)
        if core is None or 0 < core.ended_ns < ts_ns:  # another process by the same number
            core = self._cores[tgid] = _Core(tgid)
            self._cores.move_to_end(tgid)
            if len(self._cores) > MAX_INSTANCES:
                self._cores.popitem(last=False)
        return core

    def _hello(self, mark: Mark, body: m.Hello, _: Facts) -> None:
        instance = self._instance(mark)
        instance.hello = body
        if body.model and (not instance.models or instance.models[-1][1] != body.model):
            instance.models = [*instance.models[-_MAX_MODELS:], (mark.ts_ns, body.model)]

    def _stage(self, mark: Mark, body: m.Stage, _: Facts) -> None:
        stages = self._instance(mark).stages
        again = any(s.name == body.name and s.what == body.what for s in stages)
        stages.append(StageRun(body.name, body.what, body.begin_ns, mark.ts_ns, mark.tgid, mark.tid, again))
        if len(stages) > _MAX_STAGES:  # those of the start stay
            del stages[_MAX_STAGES // 2]

    def _arrived(self, mark: Mark, body: m.Arrived, _: Facts) -> None:
        self._fronts.put((mark.tgid, body.request), _Front(body, mark))

    def _tokenised(self, mark: Mark, body: m.Tokenised, _: Facts) -> None:
        front = self._fronts.get((mark.tgid, body.request))
        if front is not None:
            front.tokenised = (body.begin_ns, mark.ts_ns, body.prompt_tokens)

    def _enqueue(self, mark: Mark, body: m.Enqueued, facts: Facts) -> None:
        self._enqueued.put(body.engine_id, (body, mark))
        job = self._by_engine_id.get(body.engine_id)
        if job is not None and not job.enqueued_ns:  # the core was quicker than this batch's order
            self._join(job, facts)
        self._pending_numbers.put((mark.tgid, body.number), body.engine_id)

    def _queued(self, mark: Mark, body: m.Queued, facts: Facts) -> None:
        core = self._core(mark.tgid, mark.ts_ns)
        core.runs = None  # it names them after all
        job = Job(
            mark.tgid,
            body.number,
            body.engine_id,
            core_tid=mark.tid,
            trace_id=body.trace_id,
            queued_ns=mark.ts_ns,
            prompt_tokens=body.prompt_tokens,
            priority=body.priority,
            block_size=body.block_size,
        )
        found = core.prefixes.add(body.chain, body.blocks, body.block_size)
        job.common_tokens, job.diverged_block, job.alike_blocks = found
        core.jobs[body.number] = core.alive[body.number] = job
        self._by_engine_id.put(body.engine_id, job)
        self._count(core, "prompt_tokens", body.prompt_tokens)
        self._join(job, facts)
        while len(core.jobs) > MAX_JOBS:
            self._forget(core, next(iter(core.jobs.values())))

    def _count(self, core: _Core, name: str, n: int = 1) -> None:
        self.counts[name] += n
        core.counts[name] += n

    def _join(self, job: Job, facts: Facts) -> None:
        """Join a job with what the front end said of it and the connection it came by."""
        known = self._enqueued.get(job.engine_id)
        if known is None:
            return
        body, mark = known
        # An id is a claim: only processes of one service may speak of the same request.
        if mark.tgid != job.core and facts.service(mark.tgid) != facts.service(job.core):
            return
        job.request, job.frontend, job.frontend_tid = body.request, mark.tgid, mark.tid
        job.enqueued_ns = min(mark.ts_ns, job.queued_ns)
        self._by_front_number.put((mark.tgid, body.number), job)
        front = self._fronts.get((mark.tgid, body.request))
        if front is None:
            return
        a = front.arrived
        job.arrived_ns, job.tokenised = front.ts_ns, front.tokenised[:2]
        job.trace_id = job.trace_id or a.trace_id
        job.span_id, job.own_span_id = a.span_id, a.own_span_id
        job.n, job.logprobs, job.prompt_logprobs = a.n, a.logprobs, a.prompt_logprobs
        job.grammar, job.adapter = a.grammar, a.adapter
        job.template = a.template if not a.template or a.template in self._templates else _OTHER
        core = self._cores.get(job.core)
        if core is not None:
            core.templates[job.template] += 1
            if job.costly and job.number in core.alive:
                core.costly[job.number] = job
        known_clients = (
            self._clients.get((mark.tgid, a.client_port, a.server_port)) if a.client_port else None
        )
        client = next((c for c in reversed(known_clients or ()) if c.start_ns <= front.ts_ns), None)
        if client is not None:
            job.client = client
            job.client_left_ns = self._left.get((client.cookie, client.seq)) or 0
            if not job.own_span_id:
                caller, until_ns = (a.trace_id, a.span_id), front.ts_ns + 1
                job.own_span_id = self.spans.server(caller, mark.tgid, client.start_ns, until_ns)
            job.usual_tokens = self._inflation.usual(job, facts.service(job.frontend))
            jobs = self._by_connection.get((client.cookie, client.seq))
            if jobs is None:
                jobs = []
                self._by_connection.put((client.cookie, client.seq), jobs)
            jobs.append(job)

    def _step(self, mark: Mark, body: m.Step, _: Facts) -> None:
        core = self._core(mark.tgid, mark.ts_ns)
        core.runs = None
        if body.more:
            step = core.open.get(body.step)
            if step is not None:
                step.others += tuple(body.others)
                step.preempted += tuple(body.preempted)
                self._scheduled(core, step, body)
                step.usual_ns = core.usual.of(step.batch)
            return
        step = StepRun(
            mark.tgid,
            mark.tid,
            body.step,
            body.begin_ns,
            body.end_ns or mark.ts_ns,
            from_ns=max(body.begin_ns, core.done_ns),
            others=tuple(body.others),
            preempted=tuple(body.preempted),
            deferred=tuple(body.deferred),
            running=body.running,
            waiting=body.waiting,
            kv_used=body.kv_used,
            kv_free=body.kv_free,
            kv_cached=body.kv_cached,
            evicted=body.evicted,
        )
        if body.deferred:
            core.blocked = body.deferred[0]
        elif not body.waiting or any(s.number == core.blocked[0] for s in body.others):
            core.blocked = (0, "")
        step.blocked = core.blocked[1]
        again = core.open.pop(body.step, None)
        if again is not None:  # a number is used once
            again.done_ns = max(again.scheduled_ns, again.from_ns)
        core.steps.append(step)
        core.by_step[body.step] = core.open[body.step] = step
        step.executions.extend(self._executed.get((mark.tgid, body.step)) or ())
        self._executed.pop((mark.tgid, body.step))
        self._count(core, "steps")
        self._count(core, "batches", bool(body.decodes or body.others))
        self._count(core, "evicted_blocks", body.evicted)
        self._scheduled(core, step, body)
        step.usual_ns = core.usual.of(step.batch)
        while len(core.steps) > MAX_STEPS:
            self._drop_step(core)

    @staticmethod
    def _drop_step(core: _Core) -> None:
        step = core.steps.popleft()
        for known in (core.by_step, core.open):
            if known.get(step.step) is step:
                del known[step.step]

    def _scheduled(self, core: _Core, step: StepRun, body: m.Step) -> None:
        self._count(core, "sequences", len(body.decodes) + len(body.others))
        self._count(core, "tokens", len(body.decodes) + sum(s.tokens for s in body.others))
        taker = max(body.others, key=lambda s: s.new_blocks, default=None)
        for number, lost in body.preempted:
            job = core.jobs.get(number)
            self._count(core, "preemptions")
            if job is not None:
                who = taker.number if taker is not None and taker.new_blocks else -1
                if len(job.preemptions) < _MAX_LISTED:
                    job.preemptions.append(Preemption(step.begin_ns, step.step, lost, who))
                job.blocks, job.behind = 0, max(job.behind, lost)
        number_of_step, decodes = step.step, []
        for number, job in zip(body.decodes, map(core.jobs.get, body.decodes), strict=True):
            if job is None:
                self._count(core, "unknown_numbers")
                decodes.append(number)
                continue
            decodes.append(job.number)  # one object for all steps: a long batch is many numbers
            job.steps.append(number_of_step)
            if not job.admitted_ns:  # watching began between its queueing and now
                job.admitted_ns = step.begin_ns
        step.decodes += tuple(decodes)
        step.prompts += tuple(s for s in body.others if _is_prompt(s, core.jobs.get(s.number)))
        step.costly = tuple(number for number in core.costly if step.has(number))
        for s in body.others:
            job = core.jobs.get(s.number)
            if job is None:
                self._count(core, "unknown_numbers")
                continue
            job.steps.append(step.step)
            if not job.admitted_ns:
                job.admitted_ns = step.begin_ns
                job.cached_tokens = s.cached
                self._count(core, "cached_tokens", s.cached)
            if s.resumed and len(job.resumed) < _MAX_LISTED:
                job.resumed.append((step.begin_ns, s.recomputed))
            job.recomputed_tokens += s.recomputed
            job.blocks += s.new_blocks
            job.prefill_left = s.left
            self._count(core, "recomputed", s.recomputed)
        for number, reason in body.deferred:
            job = core.jobs.get(number)
            known = job is not None and len(job.deferred) < _MAX_LISTED
            if job is not None and known and (not job.deferred or job.deferred[-1][1] != reason):
                job.deferred.append((step.begin_ns, reason))

    def _step_done(self, mark: Mark, body: m.StepDone, _: Facts) -> None:
        core = self._core(mark.tgid, mark.ts_ns)
        step = core.open.pop(body.step, None)
        self._count(core, "output_tokens", body.tokens)
        if step is not None:
            self._close_older(core, step)
            self._done(core, step, mark, body)
        elif body.step not in core.by_step:  # its beginning was lost, not its end
            core.done_ns = mark.ts_ns
        for number, reason in body.finished:
            self._finish(core, number, mark.ts_ns, reason)

    @staticmethod
    def _close_older(core: _Core, done: StepRun) -> None:
        """Results come in order: an older step in progress has ended, and the mark of that was lost."""
        for number, step in list(core.open.items()):
            if step.begin_ns >= done.begin_ns:
                break
            ended = max((e.end_ns for e in step.executions), default=step.scheduled_ns)
            step.from_ns = max(step.begin_ns, core.done_ns)
            step.done_ns = core.done_ns = max(ended, step.from_ns)
            del core.open[number]

    def _done(self, core: _Core, step: StepRun, mark: Mark, body: m.StepDone) -> None:
        step.sent_ns, step.wait_ns, step.got_ns, step.done_ns = (
            body.sent_ns,
            body.wait_ns,
            body.got_ns,
            mark.ts_ns,
        )
        step.from_ns = max(step.begin_ns, core.done_ns)
        step.tokens_out, step.drafted, step.accepted = body.tokens, body.drafted, body.accepted
        core.done_ns = mark.ts_ns
        self._count(core, "step_ns", max(step.wall_ns, 0))
        if not step.costly and not step.empty:
            if step.prompts:
                core.usual.add_prefill(step)
            else:
                core.usual.add(step)
        got = list(map(core.jobs.get, step.decodes))
        for s in step.others:
            job = core.jobs.get(s.number)
            if job is not None and not s.left and s.computed + s.tokens >= job.behind:
                job.behind = 0
                got.append(job)
        ts_ns = mark.ts_ns
        for job in got:
            # A batch may have been made up before it was known that a request in it had ended.
            if job is None or job.aborted_ns or job.finished_ns:
                continue
            if not job.first_token_ns:
                job.first_token_ns = ts_ns
            job.last_token_ns = ts_ns
            job.output_tokens += 1

    @staticmethod
    def _finish(core: _Core, number: int, ts_ns: int, reason: str) -> Job | None:
        """A job has ended; of one that is known to have, nothing changes."""
        job = core.alive.pop(number, None)
        core.costly.pop(number, None)
        if job is not None:
            job.finished_ns, job.reason = ts_ns, reason
            core.finished.append(job)
        return job

    def _execution(self, mark: Mark, body: m.Executed, facts: Facts) -> None:
        self._instance(mark)
        executed = Execution(
            body.begin_ns,
            mark.ts_ns,
            mark.tgid,
            mark.tid,
            body.part,
            body.graph,
            body.tokens,
            body.padded,
        )
        core = self._core_for(mark.tgid, facts)
        if core is None:
            return
        step = core.by_step.get(body.step)
        if step is not None:
            if len(step.executions) < _MAX_EXECUTIONS:
                step.executions.append(executed)
        elif not core.steps or body.step > core.steps[-1].step:  # not of one that has been forgotten
            early = self._executed.get((core.tgid, body.step)) or []
            self._executed.put((core.tgid, body.step), [*early[: _MAX_EXECUTIONS - 1], executed])

    def _core_for(self, tgid: int, facts: Facts) -> _Core | None:
        """The core a worker works for: its own process, or the one core of its service, or of its parent."""
        if tgid in self._cores:
            return self._cores[tgid]
        known = self._core_of_worker.get(tgid)
        if known is not None and known in self._cores:
            return self._cores[known]
        service = facts.service(tgid)
        cores = [c for c in self._cores.values() if service and facts.service(c.tgid) == service]
        alive = [c for c in cores if not c.ended_ns]
        parent = facts.parent(tgid)
        mine = [c for c in alive if c.tgid == parent] or alive
        if len(mine) != 1:
            return None
        self._core_of_worker.put(tgid, mine[0].tgid)
        return mine[0]

    def _output(self, mark: Mark, body: m.Output, _: Facts) -> None:
        taken, finished = (body.begin_ns, mark.ts_ns), {*body.finished}
        for number in {*body.requests, *finished}:
            job = self._front_job(mark.tgid, number)
            if job is None:
                continue
            job.outputs.append(taken)
            if number in finished:
                job.delivered_ns = mark.ts_ns
                core = self._cores.get(job.core)
                if core is not None:  # what the core said of its end may be lost
                    self._finish(core, job.number, job.last_token_ns or mark.ts_ns, "")

    def _front_job(self, tgid: int, number: int) -> Job | None:
        job = self._by_front_number.get((tgid, number))
        if job is None:
            engine_id = self._pending_numbers.get((tgid, number))
            job = self._by_engine_id.get(engine_id) if engine_id is not None else None
            if job is not None:
                self._by_front_number.put((tgid, number), job)
        return job

    def _aborted(self, mark: Mark, body: m.Aborted, _: Facts) -> None:
        core = self._cores.get(mark.tgid)
        for number in body.numbers:
            if body.side == "core":
                job = self._finish(core, number, mark.ts_ns, "abort") if core is not None else None
            else:
                job = self._front_job(mark.tgid, number)
            if job is not None:
                job.aborted_ns = job.aborted_ns or mark.ts_ns

    def _gauged(self, mark: Mark, body: m.Gauges, _: Facts) -> None:
        self.gauges.put(mark.tgid, (mark.ts_ns, body))

    def _healthy(self, mark: Mark, body: m.Health, _: Facts) -> None:
        self.health.put(mark.tgid, (mark.ts_ns, body))

    def _layered(self, mark: Mark, body: m.Layers, _: Facts) -> None:
        self.layers.put(mark.tgid, (mark.ts_ns, body))

    def _generated(self, mark: Mark, body: m.Generated, _: Facts) -> None:
        found = anonymous.of_generated(mark, body)
        if found is not None:
            self.seen([found])

    def _passed(self, mark: Mark, body: m.Pass, _: Facts) -> None:
        found = anonymous.of_pass(mark, body)
        if found is not None:
            self.seen([found])

    def _cache_changed(self, mark: Mark, body: m.CacheChanged, _: Facts) -> None:
        core = self._core(mark.tgid, mark.ts_ns)
        runs = self._runs(core)
        if runs is None:
            return
        core.engine = core.engine or anonymous.TRANSFORMERS
        if body.used_blocks + body.free_blocks:
            runs.kv = body.used_blocks, body.free_blocks, body.cached_blocks

    def _span_on(self, mark: Mark, body: m.SpanOn, _: Facts) -> None:
        self.spans.add(mark, body)

    def _expire(self, now_ns: int) -> None:
        oldest = now_ns - self._window_ns
        for core in list(self._cores.values()):
            while core.steps and core.steps[0].done_ns and core.steps[0].done_ns < oldest:
                self._drop_step(core)
            while core.finished and core.finished[0].finished_ns < oldest:
                self._forget(core, core.finished.popleft())
            if core.ended_ns and core.ended_ns < oldest:
                del self._cores[core.tgid]
        for instance in self._instances.values():
            if instance.ended_ns and instance.ended_ns < oldest:
                self._instances.pop(instance.tgid)

    def _forget(self, core: _Core, job: Job) -> None:
        for known in (core.jobs, core.alive, core.costly):
            if known.get(job.number) is job:
                del known[job.number]
        if self._by_engine_id.get(job.engine_id) is job:
            self._by_engine_id.pop(job.engine_id)
            known_front = self._enqueued.get(job.engine_id)
            if known_front is not None:
                number = known_front[1].tgid, known_front[0].number
                self._enqueued.pop(job.engine_id)
                self._pending_numbers.pop(number)
                if self._by_front_number.get(number) is job:
                    self._by_front_number.pop(number)
        jobs = self._by_connection.get((job.client.cookie, job.client.seq))
        if jobs is not None and job in jobs:
            jobs.remove(job)
            if not jobs:
                self._by_connection.pop((job.client.cookie, job.client.seq))


def _is_prompt(s: Scheduled, job: Job | None) -> bool:
    """Whether a request's part of a step computes its prompt, or what it lost; not drafted tokens to be verified."""
    if s.left or s.recomputed or s.resumed:
        return True
    return s.computed < job.prompt_tokens if job is not None else s.tokens >= _PROMPT_TOKENS


_HANDLERS: Final[dict[type, Callable[[EngineTable, Mark, Any, Facts], None]]] = {
    m.Hello: EngineTable._hello,
    m.Stage: EngineTable._stage,
    m.Arrived: EngineTable._arrived,
    m.Tokenised: EngineTable._tokenised,
    m.Enqueued: EngineTable._enqueue,
    m.Queued: EngineTable._queued,
    m.Step: EngineTable._step,
    m.StepDone: EngineTable._step_done,
    m.Executed: EngineTable._execution,
    m.Output: EngineTable._output,
    m.Aborted: EngineTable._aborted,
    m.Gauges: EngineTable._gauged,
    m.Health: EngineTable._healthy,
    m.Layers: EngineTable._layered,
    m.Generated: EngineTable._generated,
    m.Pass: EngineTable._passed,
    m.CacheChanged: EngineTable._cache_changed,
    m.SpanOn: EngineTable._span_on,
}
