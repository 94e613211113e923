"""How the rows of benchmarks/frameworks.py set up the Trainers: all in the same way, and quiet."""

import importlib
import logging
import warnings

MODULES = {"transformers": "transformers", "lightning": "lightning.pytorch"}  # by what pip installs


def imported(package):
    """Import a framework, and leave out what it prints: a table has to be found among it."""
    importlib.import_module(MODULES[package])
    warnings.simplefilter("ignore")
    if package == "lightning":
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        return
    from transformers.utils import logging as of_transformers

    of_transformers.disable_progress_bar()


def hf_arguments(work, folder, steps, **more):
    """Return arguments without what costs time beside the steps."""
    from transformers import TrainingArguments

    return TrainingArguments(
        str(folder),
        max_steps=steps,
        use_cpu=not work.on_gpu,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        logging_nan_inf_filter=False,  # it would wait for the device in each step
        max_grad_norm=0.0,
        **more,
    )


def hf_trainer(model, arguments, data, callback, by_gdsdata, **more):
    """Return a Trainer of transformers.

    Args:
        by_gdsdata: with gdsdata's data and checkpoints; "background": these while training goes on.
        model, arguments, data, callback, more: of the Trainer.
    """
    import transformers

    from gdsdata.integrations import hf_trainer as adapter

    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback], **more)
    trainer.remove_callback(transformers.PrinterCallback)
    return adapter.use(trainer, checkpoints=by_gdsdata) if by_gdsdata else trainer


def lightning_trainer(work, steps, callback, **more):
    """Return Lightning's Trainer for one device."""
    import lightning.pytorch as lightning

    return lightning.Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="gpu" if work.on_gpu else "cpu",
        devices=1,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )
