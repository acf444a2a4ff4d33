"""Parts of policy-gradient algorithms: rewards -> advantages -> loss, and the trainer that runs it.

    trainer        PolicyGradientTrainer: one step; an algorithm defines ``compute_advantages``
    config         PolicyGradientConfig, ClippedConfig and blocks of knobs; imports no torch
    rewards        shaped_rewards: scaling, punishment of length
    advantages     group_advantages, batch_normalized, clip_advantages, over_valid, has_spread
    kl_charge      ChargeKL, with_kl, kl_to_go: a KL from the initial policy that lowers advantages
    loss           PolicyGradientLoss, the base of losses, and ClippedPolicyGradientLoss
    correction     build_correction: weights of tokens for a sampler that is not quite the policy
    token_masks    OffPolicyMask: tokens that a loss leaves out
    disagreement   DropDisagreeing: responses left out on which trainer and sampler disagree
    turn_credit    TurnCredit: each answer of an episode credited with what was earned from there on
    seats          by_seat: the seats of an episode as samples of their own
    penalties      PenaliseMessages: advantages of faulty messages
    updates        BatchTransform: what happens to a batch before its updates; run_updates: its optimizer steps
    metrics        advantage_metrics, group_metrics, kl_metrics

``trainer``, ``config``, ``rewards``, ``advantages``, ``updates`` and ``metrics`` are imported without torch, so a file
may hold a config and its trainer.
"""
