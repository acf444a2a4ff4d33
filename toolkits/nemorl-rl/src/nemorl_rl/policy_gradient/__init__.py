"""What policy-gradient algorithms are made of: rewards -> advantages -> loss, and the trainer that runs it.

    trainer        PolicyGradientTrainer: one step; an algorithm defines ``compute_advantages``
    config         PolicyGradientConfig, ClippedConfig and blocks of knobs; imports no torch
    rewards        shaped_rewards: scaling, punishment of length
    advantages     group_advantages, batch_normalized, clip_advantages, over_valid, has_spread
    transforms     BatchTransform: what happens to a batch before its updates, one knob each
    kl_charge      ChargeKL, with_kl, group_kl, kl_to_go: a KL from the initial policy that lowers advantages
    loss           PolicyGradientLoss, the base of losses, and ClippedPolicyGradientLoss
    correction     build_correction: weights of tokens for a sampler that is not quite the policy
    disagreement   DropDisagreeing: responses left out on which trainer and sampler disagree
    updates        run_updates: the optimizer steps of a batch, metrics averaged (``nemorl.metrics.average``)
    metrics        advantage_metrics, group_metrics, kl_metrics

``trainer``, ``config``, ``rewards``, ``advantages``, ``updates`` and ``metrics`` are imported without torch, so a file
may hold a config and its trainer.
"""
