"""The Flower ClientApp: at a real site it hands messages to the guard, in a simulation it answers as the node's sites.

A real node says where its guard is, by `--node-config 'guard="PATH"'`; `fl-dpgan site node` does so.
"""

from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query()
def query(message: Message, context: Context) -> Message:
    """Say who is there."""
    return answer(message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train, or release what a mechanism allows."""
    return answer(message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Count what a classifier gets right."""
    return answer(message, context)


def answer(message: Message, context: Context) -> Message:
    """The answer of the node's guard, or of its simulated sites."""
    if guard := context.node_config.get("guard"):
        from fl_dpgan.federation import relay

        return relay.answer(message, Path(str(guard)))
    from fl_dpgan.federation.simulation import Job, answer_as_simulated

    data_dir = str(context.run_config["data-dir"])
    job = Job(Path(str(context.run_config["out"])).absolute(), Path(data_dir) if data_dir else None)
    return answer_as_simulated(message, context, job)
