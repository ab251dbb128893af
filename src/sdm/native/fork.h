// A process may fork while its other threads are inside an op. The child has none of these threads.
#pragma once

namespace sdm {

// Whether this process is the child of a fork that happened after the core was loaded. OpenMP must not be used there:
// its runtime would wait for the parent's threads.
bool is_forked_child();

}  // namespace sdm
