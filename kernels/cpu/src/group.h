/* Ranks: processes that each hold a part of a model and exchange partial results.
 *
 * They share memory: a line of counters for each rank and two sets of slots, one per rank, of
 * floats. A rank writes its slot, meets the others, and reads theirs. The next exchange uses the
 * other set, which no rank reads any more, so each exchange needs only one meeting. */
#ifndef AP_GROUP_H
#define AP_GROUP_H

#include <stdbool.h>

#include "appliance_cpu.h"

int32_t group_size(const ap_group *group);
int32_t group_rank(const ap_group *group);
int64_t group_floats(const ap_group *group); /* of a slot */

/* A rank's slot in the current exchange. */
float *group_slot(const ap_group *group, int32_t rank);

/* Wait until all ranks are here; false: one has ended, and no later call waits. */
bool group_meet(ap_group *group);

/* Go on to the next exchange. */
void group_turn(ap_group *group);

/* True if a rank has ended. */
bool group_is_broken(const ap_group *group);

/* Meet, and return the worst status of all ranks. */
ap_status group_agree(ap_group *group, ap_status status);

#endif
