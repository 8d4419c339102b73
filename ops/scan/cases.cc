#include "dtensor/ops/cases.h"

#include "dtensor/ops/rules.h"
#include "dtensor/ops/scan/run.h"

namespace dtensor {

#define DT_SCAN_SAMPLES "self[a,b] dim=1 | self[a,b,c] dim=0 | self[...] dim=-1 | self[a,0] dim=1"

void AddScanCases(CaseTable* table) {
  table->Add({
      DT_CASE(cumsum, DT_SCAN_SAMPLES, cumsum(a.T("self"), a.Int("dim"), a.Type("dtype"))),
      DT_CASE(cumprod, DT_SCAN_SAMPLES, cumprod(a.T("self"), a.Int("dim"), a.Type("dtype"))),
      DT_CASE(cumsum_, DT_SCAN_SAMPLES, cumsum_(a.Written("self"), a.Int("dim"))),
      DT_CASE(cumprod_, DT_SCAN_SAMPLES, cumprod_(a.Written("self"), a.Int("dim"))),
      DT_CASE(logcumsumexp, DT_SCAN_SAMPLES, logcumsumexp(a.T("self"), a.Int("dim"))),
      DT_CASE(cummax, DT_SCAN_SAMPLES, cummax(a.T("self"), a.Int("dim"))),
      DT_CASE(cummin, DT_SCAN_SAMPLES, cummin(a.T("self"), a.Int("dim"))),
  });
}

}  // namespace dtensor
