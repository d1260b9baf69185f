"use strict";
// The charts of a comparison's page: the same of both plans.
for (const name of ["first", "second"]) {
  showTimeline(`${name}-timeline`, page.data[name].timeline);
  page.chart(`${name}-memory`, drawMemory(page.data[name]));
}
