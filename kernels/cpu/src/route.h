/* The experts of one row, and their weights, from a router's logits. */
#ifndef AP_ROUTE_H
#define AP_ROUTE_H

#include <string.h>

#include "appliance_cpu.h"
#include "route_select.h"

static bool router_supported(const ap_router *r) {
    int32_t experts = r->num_experts, groups = r->num_groups;
    if (experts < 1 || experts > AP_MOST_EXPERTS || r->top_k < 1 || r->top_k > experts)
        return false;
    if (r->scoring < AP_SOFTMAX || r->scoring > AP_SOFTMAX_OF_CHOSEN) return false;
    if (groups < 1 || experts % groups || r->top_groups < 1 || r->top_groups > groups)
        return false;
    int32_t width = experts / groups, best = r->best_of_group;
    if (groups > 1 && (best < 1 || best > 2 || width < best)) return false;
    return groups == 1 || r->top_k <= r->top_groups * width;
}

static void softmax(float *x, int32_t n) {
    float highest = x[0], sum = 0.0f;
    for (int32_t i = 1; i < n; i++) highest = x[i] > highest ? x[i] : highest;
    for (int32_t i = 0; i < n; i++) sum += x[i] = expf(x[i] - highest);
    for (int32_t i = 0; i < n; i++) x[i] /= sum;
}

/* logits (num_experts,) into scores, in place */
static void score_experts(const ap_router *r, float *logits) {
    int32_t n = r->num_experts;
    if (r->scoring == AP_SOFTMAX) softmax(logits, n);
    for (int32_t i = 0; i < n && r->scoring == AP_SIGMOID; i++)
        logits[i] = 1.0f / (1.0f + expf(-logits[i]));
}

/* Exclude all groups but the best; a group's score is that of its best, or of its two best. */
static void close_groups(const ap_router *r, candidate *choice) {
    int32_t width = r->num_experts / r->num_groups;
    candidate groups[AP_MOST_EXPERTS];
    for (int32_t g = 0; g < r->num_groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (int32_t i = 0; i < width; i++) {
            float score = choice[g * width + i].score;
            if (score > first || isnan(score)) second = first, first = score;
            else if (score > second) second = score;
        }
        groups[g] = (candidate){r->best_of_group == 1 ? first : first + second, g};
    }
    select_best(groups, r->top_groups, r->num_groups);
    for (int32_t g = r->top_groups; g < r->num_groups; g++)
        for (int32_t i = 0; i < width; i++)
            choice[groups[g].id * width + i].score = -INFINITY;
}

/* logits (num_experts,) are overwritten; ids (top_k,) and weights (top_k,) */
static void route(const ap_router *r, float *logits, int32_t *ids, float *weights) {
    candidate choice[AP_MOST_EXPERTS];
    score_experts(r, logits);
    for (int32_t i = 0; i < r->num_experts; i++) {
        float bias = r->selection_bias ? r->selection_bias[i] : 0.0f;
        choice[i] = (candidate){logits[i] + bias, i};
    }
    if (r->num_groups > 1) close_groups(r, choice);
    select_best(choice, r->top_k, r->num_experts);
    sort_candidates(choice, r->top_k); /* an order that does not depend on the selection */
    for (int32_t i = 0; i < r->top_k; i++) {
        ids[i] = choice[i].id;
        weights[i] = logits[choice[i].id];
    }
    if (r->scoring == AP_SOFTMAX_OF_CHOSEN) softmax(weights, r->top_k);
    float sum = r->epsilon;
    for (int32_t i = 0; i < r->top_k; i++) sum += weights[i];
    for (int32_t i = 0; i < r->top_k; i++)
        weights[i] = (r->renormalize ? weights[i] / sum : weights[i]) * r->scale;
    for (int32_t i = 0; i < r->top_k && r->expert_scale; i++) weights[i] *= r->expert_scale[ids[i]];
}

#endif
