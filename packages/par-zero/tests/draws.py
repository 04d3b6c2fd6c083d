"""Training programs that are drawn from a seed."""

from random import Random

from .random_programs import ALL, EXPERTS, Backward, Evaluate, Forward, Freeze, NoSync, Program, Step, Visit


def draw(setup, ranks, seed):
    """A program of four to six steps."""
    return Draw(Random(f"{setup!r} {ranks} {seed}"), setup, ranks).program()


class Draw:
    """Draws a program.

    Args:
        random: Where numbers come from.
        setup: How the module is sharded.
        ranks: Number of ranks.
    """

    def __init__(self, random, setup, ranks):
        self.random, self.setup, self.ranks = random, setup, ranks
        self.who = "alike" if setup.alike else random.choice(["alike", "one", "one", "each"])
        self.orders = random.random() < (0.3 if setup.stage == 3 and self.who != "alike" else 0.7)
        self.checkpoint = random.choice([None, None, None, "plain", "reentrant"])
        # Below stage 3 a module in two reentrant checkpoints of a backward is a named error.
        self.repeats = self.checkpoint != "reentrant" or setup.stage == 3
        self.frozen = set()

    def chance(self, probability):
        return self.random.random() < probability

    def program(self):
        steps = [self.step(first=number == 0) for number in range(self.random.randint(4, 6))]
        return Program(self.setup, self.ranks, tuple(steps))

    def step(self, *, first):
        self.letters = iter("abcdefghij")
        ops = []
        if not first and self.chance(0.2):
            expert = self.random.randrange(EXPERTS)
            ops.append(Freeze(expert, expert not in self.frozen))
            self.frozen ^= {expert}
        if not first and self.chance(0.1):
            ops.append(Visit("write"))
        if first:  # a first pass with all units, so that later ranks may skip them
            ops += self.passes("once", (ALL,))
        count = self.random.choice([0, 0, 1, 2] if first else [1, 1, 2, 3])
        for number in range(count):
            if self.chance(0.3):
                ops.append(self.random.choice([Evaluate(self.runs()), *map(Visit, ("summon", "state", "load"))]))
            last = number == count - 1
            if not last and self.chance(0.4):
                ops.append(NoSync(tuple(self.block()), keep=self.chance(0.5)))
            elif not last and self.chance(0.2):
                ops += self.failing()
            else:
                ops += self.block()
        if self.chance(0.2):
            ops.append(Evaluate(self.runs()))
        steps = None
        if self.setup.optimizers == 2 and self.chance(0.2):
            steps = (self.random.randrange(2),)
        zero = self.random.choice(["none", "none", "zeros", "module"])
        return Step(tuple(ops), self.chance(0.3), zero, steps)

    def block(self):
        """A forward and a backward, or some of them."""
        more = ["sum", "crossed"] if self.repeats else []
        how = self.random.choice(["once"] * 6 + ["twice", "turned", "lost", "between", *more])
        return self.passes(how, self.runs(), self.runs())

    def passes(self, how, runs, others=()):
        def forward(of):
            return Forward(next(self.letters), of, self.checkpoint)

        one = forward(runs)
        if how == "once":
            return [one, Backward(one.loss)]
        if how == "twice":
            return [one, Backward(one.loss, retain=True), Backward(one.loss)]
        if how == "between":
            visit = self.random.choice([Evaluate(self.runs()), Visit("summon"), Visit("state")])
            # A rank that departs in the forward would gather while the others summon, which no rule orders.
            if visit == Visit("summon") and self.setup.stage == 3 and self.who != "alike":
                visit = Visit("state")
            return [one, visit, Backward(one.loss)]
        two = forward(others)
        if how == "lost":
            return [one, two, Backward(two.loss)]
        if how == "sum":
            return [one, two, Backward(one.loss + two.loss)]
        first, second = (one, two) if how == "crossed" else (two, one)
        return [one, two, Backward(first.loss), Backward(second.loss)]

    def failing(self):
        """A pass that fails on all ranks, at the same place, or on one rank of a module whose ranks compare."""
        mark = self.random.choice("!?")
        tokens = self.run().split()
        failed = tokens.copy()
        failed.insert(self.random.randint(0, len(tokens)), mark)
        runs = [" ".join(failed)]
        if self.setup.stage == 3 and not (self.setup.hybrid or self.setup.alike) and self.chance(0.5):
            runs = [" ".join(tokens)] * self.ranks
            runs[self.random.randrange(self.ranks)] = " ".join(failed)
        return self.passes("once", tuple(runs))

    def runs(self):
        """What each rank runs in a forward."""
        if self.who == "alike" or self.chance(0.3):
            return (self.run(),)
        if self.who == "each":
            return tuple(self.run() for _ in range(self.ranks))
        texts = [self.run()] * self.ranks
        texts[self.random.randrange(self.ranks)] = self.run()
        return tuple(texts)

    def run(self):
        if self.chance(0.3):
            return ALL
        tokens = [str(number) for number in range(EXPERTS) if self.chance(0.7)]
        if self.orders and self.chance(0.3):
            self.random.shuffle(tokens)
        if tokens and self.orders and self.repeats and self.chance(0.3):
            tokens.insert(self.random.randint(0, len(tokens)), self.random.choice(tokens))
        tokens = [token + "-" if self.chance(0.1) else token for token in tokens]
        return " ".join([*tokens, "h"] if self.chance(0.8) else tokens)
