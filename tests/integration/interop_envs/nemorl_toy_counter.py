"""A taskset of verifiers whose tool keeps a count per episode. Imported by verifiers, under its own interpreter."""

import verifiers.v1 as vf

__all__ = ["Counter"]


class CounterState(vf.State):
    count: int = 0


class CounterTools(vf.Toolset[vf.ToolsetConfig, CounterState]):
    TOOL_PREFIX = None

    @vf.tool
    async def add(self, amount: int) -> str:
        """Add to the counter."""
        self.state.count += amount
        return str(self.state.count)


class CounterData(vf.TaskData):
    wanted: int


class CounterTask(vf.Task[CounterData, CounterState, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [CounterTools(vf.ToolsetConfig())]

    @vf.reward(weight=2.0)
    async def reached(self, trace) -> float:
        if self.data.wanted < 0:
            raise ValueError("the count is below nothing")
        return float(trace.state.count == self.data.wanted)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))


class CounterConfig(vf.TasksetConfig):
    first: int = 2
    tasks: int = 3


class Counter(vf.Taskset[CounterTask, CounterConfig]):
    def load(self):
        for wanted in range(self.config.first, self.config.first + self.config.tasks):
            yield CounterTask(CounterData(prompt=f"Count to {wanted}.", wanted=wanted), self.config.task)


if __name__ == "__main__":
    CounterTools.run()
